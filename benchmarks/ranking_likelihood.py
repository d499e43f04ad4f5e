"""Rank by log P(query | document), in turn with a peer that scores some of the pairs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from interleave import Comparison
from numpy.typing import NDArray
from peer_transformers import TransformersPeer
from ranking_data import RankingTask
from served import Served
from tokenizers import Tokenizer

OURS = "stemserve"
PEER = "transformers, a pair at a time"
GROUP = 12  # documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Documents of one round, and the pairs of them that the peer scores too."""

    documents: range
    pairs: tuple[tuple[int, int], ...]  # query, document


def prompt(document: str) -> str:
    return f"Abstract: {document}\nThe topic of this paper is:"


def continuation(query: str) -> str:
    return f" {query}"


class LikelihoodRanking:
    """The comparison, and the scores of all pairs that it leaves behind."""

    def __init__(
        self, task: RankingTask, tokenizer: Tokenizer, *, pairs_per_group: int, seed: int
    ) -> None:
        self._task = task
        self._documents = [tokenizer.encode(prompt(text)).ids for text in task.documents]
        self._queries = [tokenizer.encode(continuation(text)).ids for text in task.queries]
        self._pairs_per_group = pairs_per_group
        self._rng = np.random.default_rng(seed)
        self.log_likelihoods = np.full(task.relevant.shape, np.nan)

    @property
    def groups(self) -> int:
        return len(self._task.documents) // GROUP

    def comparison(self, served: Served, peer: TransformersPeer) -> Comparison[Group]:
        """Seconds a pair. Our time has everything: documents registered and computed, then a call
        for each query over all documents of the group."""
        served.rank(continuation("warm-up"), [served.register_text(prompt("Nothing yet."))])
        peer.log_likelihood(self._documents[0], self._queries[0])

        def ours(group: Group) -> tuple[NDArray[np.float64], float]:
            started = time.perf_counter()
            ids = [served.register_text(prompt(self._task.documents[i])) for i in group.documents]
            for number, query in enumerate(self._task.queries):
                scores = served.rank(continuation(query), ids).scores
                self.log_likelihoods[number, group.documents] = scores
            seconds = time.perf_counter() - started
            sums = np.array([self.log_likelihoods[pair] for pair in group.pairs])
            pairs = len(group.documents) * len(self._task.queries)
            return self._per_token(sums, group), seconds / pairs

        def theirs(group: Group) -> tuple[NDArray[np.float64], float]:
            started = time.perf_counter()
            logprobs = [
                peer.log_likelihood(self._documents[document], self._queries[query])
                for query, document in group.pairs
            ]
            seconds = time.perf_counter() - started
            sums = np.array([values.sum() for values in logprobs])
            return self._per_token(sums, group), seconds / len(group.pairs)

        return Comparison(
            title="Ranking by likelihood, seconds a pair",
            sides={OURS: ours, PEER: theirs},
            work=self._rounds(),
            warm_up_rounds=0,
        )

    def _rounds(self) -> Iterator[Group]:
        documents = range(len(self._task.documents))
        for start in documents[::GROUP]:
            members = documents[start : start + GROUP]
            chosen = self._rng.choice(GROUP * len(self._queries), self._pairs_per_group, False)
            pairs = tuple((int(c) // GROUP, start + int(c) % GROUP) for c in chosen)
            yield Group(documents=members, pairs=pairs)

    def _per_token(self, sums: NDArray[np.float64], group: Group) -> NDArray[np.float64]:
        return sums / [len(self._queries[query]) for query, _ in group.pairs]
