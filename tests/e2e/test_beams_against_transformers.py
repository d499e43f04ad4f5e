"""Beam searches of small random models equal those of transformers: sequences and scores."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from tests.e2e.engine_rig import Generated
from tests.e2e.generate_cases import generation
from tests.e2e.oracle import Oracle
from tests.e2e.random_models import FAMILIES, VOCAB, MakeRig, RandomModel, RandomModels

from stemserve.proto.v1 import inference_pb2

Rng = np.random.Generator
STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
MODES = {
    inference_pb2.EARLY_STOPPING_HEURISTIC: False,
    inference_pb2.EARLY_STOPPING_FIRST: True,
    inference_pb2.EARLY_STOPPING_NEVER: "never",
}
PENALTIES = (0.0, 0.6, 1.0, 2.0, -0.5)
TOLERANCE = 1e-4
MODELS = 20
SEARCHES = 2  # of each model


@dataclass(frozen=True, kw_only=True)
class Search:
    prompt: list[int]
    width: int
    best: int
    penalty: float
    mode: inference_pb2.EarlyStopping.ValueType
    end_ids: list[int] = field(default_factory=list[int])
    new_tokens: int = 20  # past the end of a page
    least: int = 0

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        request = generation(
            self.prompt,
            stop_token_ids=self.end_ids,
            max_new_tokens=self.new_tokens,
            min_new_tokens=self.least,
            n=self.best,
            logprobs=True,
        )
        request.ClearField("sampling")
        request.beam_search.width = self.width
        request.beam_search.length_penalty = self.penalty
        request.beam_search.early_stopping = self.mode
        return request

    def expected(self, oracle: Oracle) -> list[tuple[list[int], float]]:
        least: dict[str, object] = (
            {"min_new_tokens": self.least} if self.least and self.end_ids else {}
        )
        stopping: dict[str, object] = {"early_stopping": MODES[self.mode]}
        if self.width == 1:  # there it is greedy, and these are unknown
            stopping = {}
        return oracle.beam_search(
            self.prompt,
            end_ids=self.end_ids,
            num_beams=self.width,
            num_return_sequences=self.best,
            penalty=self.penalty,
            max_new_tokens=self.new_tokens,
            **stopping,
            **least,
        )


def likely_ends(rng: Rng, oracle: Oracle, prompt: list[int], count: int) -> list[int]:
    """Ids, some of which the first rows hold likely."""
    likely = np.argsort(-oracle.logits(prompt)[-1])[4:30]
    chosen = [*rng.permutation(likely)[: -(-count // 2)], *rng.integers(0, VOCAB, count // 2)]
    return sorted({int(token_id) for token_id in chosen})


def any_search(rng: Rng, oracle: Oracle) -> Search:
    width = int(rng.integers(1, 9))
    prompt: list[int] = rng.integers(0, VOCAB, int(rng.choice([1, 15, 16, 17, 40]))).tolist()
    return Search(
        prompt=prompt,
        width=width,
        best=int(rng.integers(1, width + 1)),
        penalty=float(rng.choice(PENALTIES)),
        mode=list(MODES)[int(rng.integers(len(MODES)))],
        end_ids=likely_ends(rng, oracle, prompt, int(rng.choice([0, 1, 3, 12]))),
        least=int(rng.choice([0, 0, 5])),
    )


def decided_search(rng: Rng, model: RandomModel) -> Search:
    """One whose outcome is not a matter of rounding."""
    exact = model.oracle.in_type(torch.float64)
    while True:
        search = any_search(rng, model.oracle)
        found, exactly = search.expected(model.oracle), search.expected(exact)
        if [t for t, _ in found] == [t for t, _ in exactly]:
            return search


def assert_found(answer: object, search: Search, oracle: Oracle) -> None:
    assert isinstance(answer, Generated), answer
    expected = search.expected(oracle)
    assert [answer.tokens[rank] for rank in range(search.best)] == [t for t, _ in expected]
    scores = [answer.scores[rank] for rank in range(search.best)]
    np.testing.assert_allclose(scores, [s for _, s in expected], rtol=TOLERANCE, atol=TOLERANCE)
    for rank, (tokens, _) in enumerate(expected):
        ended = tokens[-1] in search.end_ids
        assert answer.finish[rank] == (STOP if ended else LENGTH)
        logprobs = oracle.token_logprobs(search.prompt, tokens)
        np.testing.assert_allclose(answer.logprobs[rank], logprobs, atol=TOLERANCE)
    usage = answer.usage
    assert usage.prompt_tokens == usage.cached_tokens + usage.computed_tokens == len(search.prompt)
    assert usage.output_tokens == sum(len(tokens) for tokens, _ in expected)


@pytest.mark.parametrize("number", range(MODELS))
async def test_beams_of_random_models_are_those_of_transformers(
    models: RandomModels, make_rig: MakeRig, seed: int, number: int
) -> None:
    """Alone with a cold cache, then all at once (b40), in small steps that part the rounds."""
    rng = np.random.default_rng(seed)
    model = models.seeded(FAMILIES[number % len(FAMILIES)], seed)
    rig = make_rig(model, max_step_tokens=int(rng.choice([5, 64])))
    searches = [decided_search(rng, model) for _ in range(SEARCHES)]
    for search in searches:
        assert_found(await rig.generate(search.request), search, model.oracle)
    beside = generation(searches[0].prompt, n=3, max_new_tokens=40)
    answers = await rig.run(*(search.request for search in searches), beside)
    for search, answer in zip(searches, answers, strict=False):
        assert_found(answer, search, model.oracle)
