"""Beam searches over sets of sequences, and what transformers finds for them."""

from dataclasses import dataclass

import numpy as np
import torch
from tests.e2e.engine_rig import Generated
from tests.e2e.generate_cases import generation
from tests.e2e.oracle import Oracle
from tests.e2e.random_models import VOCAB, random_tokens
from tests.e2e.test_constraints import packed
from tests.service.serving import EOS_ID

from stemserve.proto.v1 import inference_pb2

Rng = np.random.Generator
STOP = inference_pb2.FINISH_REASON_STOP
NONE_LEFT = inference_pb2.FINISH_REASON_NONE_LEFT
MODES = {
    inference_pb2.EARLY_STOPPING_HEURISTIC: False,
    inference_pb2.EARLY_STOPPING_NEVER: "never",
}
SECOND_END = VOCAB - 1
ENDS = [EOS_ID, SECOND_END]
ILLEGAL = -1e6  # transformers goes on with beams that are none, at less than this
TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class SetSearch:
    """The likeliest of a set of sequences."""

    prompt: list[int]
    sequences: list[list[int]]
    width: int
    best: int
    penalty: float
    mode: inference_pb2.EarlyStopping.ValueType
    new_tokens: int = 20

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        request = generation(
            self.prompt,
            ignore_eos=False,
            stop_token_ids=[SECOND_END],
            max_new_tokens=self.new_tokens,
            n=self.best,
            logprobs=True,
        )
        request.ClearField("sampling")
        request.token_sequences.CopyFrom(packed(self.sequences))
        request.beam_search.width = self.width
        request.beam_search.length_penalty = self.penalty
        request.beam_search.early_stopping = self.mode
        return request

    def expected(self, oracle: Oracle) -> list[tuple[list[int], float]]:
        found = oracle.beam_search(
            self.prompt,
            end_ids=ENDS,
            num_beams=self.width,
            num_return_sequences=self.best,
            penalty=self.penalty,
            max_new_tokens=self.new_tokens,
            early_stopping=MODES[self.mode],
            prefix_allowed_tokens_fn=self._allowed,
        )
        return [(tokens, score) for tokens, score in found if score > ILLEGAL]

    def _allowed(self, _: int, ids: torch.Tensor) -> list[int]:
        said: list[int] = ids[len(self.prompt) :].numpy().tolist()
        going_on = [each for each in self.sequences if each[: len(said)] == said]
        legal = {each[len(said)] for each in going_on if len(each) > len(said)}
        if said in self.sequences or not legal:  # it asks of what cannot be, too
            legal.update(ENDS)
        return sorted(legal)


def any_search(rng: Rng) -> SetSearch:
    alphabet = rng.permutation(VOCAB - 20)[: rng.choice([2, 6, 60])]
    sequences: list[list[int]] = [
        rng.choice(alphabet, rng.integers(1, 7)).tolist()
        for _ in range(rng.choice([1, 4, 30, 200]))
    ]
    width = int(rng.choice([2, 3, 8, 17]))
    return SetSearch(
        prompt=random_tokens(rng, int(rng.choice([1, 15, 16, 40]))),
        sequences=sequences,
        width=width,
        best=int(rng.integers(1, width + 1)),
        penalty=float(rng.choice([0.0, 0.6, 1.0, 2.0])),
        mode=list(MODES)[int(rng.integers(len(MODES)))],
    )


def decided_search(rng: Rng, oracle: Oracle) -> SetSearch:
    """One whose outcome is not a matter of rounding."""
    exact = oracle.in_type(torch.float64)
    while True:
        search = any_search(rng)
        if [t for t, _ in search.expected(oracle)] == [t for t, _ in search.expected(exact)]:
            return search


def assert_found(answer: object, search: SetSearch, oracle: Oracle) -> None:
    assert isinstance(answer, Generated), answer
    expected = search.expected(oracle)
    left = search.best - len(expected)
    tokens = [answer.tokens[rank] for rank in range(search.best)]
    assert tokens == [tokens for tokens, _ in expected] + [[]] * left
    reasons = [answer.finish[rank] for rank in range(search.best)]
    assert reasons == [STOP] * len(expected) + [NONE_LEFT] * left
    scores = [answer.scores[rank] for rank in range(search.best)]
    wanted = [score for _, score in expected] + [-np.inf] * left
    np.testing.assert_allclose(scores, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    for rank, (each, _) in enumerate(expected):
        logprobs = oracle.token_logprobs(search.prompt, each)
        np.testing.assert_allclose(answer.logprobs[rank], logprobs, atol=TOLERANCE)
