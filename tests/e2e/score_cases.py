"""Score calls of token ids, and what transformers says that their answers are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from tests.e2e.oracle import Float64, Oracle

from stemserve.proto.v1 import inference_pb2

Tokens = Sequence[int]
TOLERANCE = 1e-4  # of a log-probability


def blob(tokens: Tokens) -> bytes:
    return np.array(tokens, dtype="<u4").tobytes()


def packed(sequences: Sequence[Tokens]) -> inference_pb2.PackedTokens:
    return inference_pb2.PackedTokens(
        tokens=blob([token for tokens in sequences for token in tokens]),
        offsets=[0, *accumulate(map(len, sequences))],
    )


@dataclass(frozen=True, kw_only=True)
class ScoreCase:
    """A likelihood call; with labels, one of label probabilities."""

    contexts: Sequence[Tokens]
    items: Sequence[Tokens]
    item_context: Sequence[int] = ()
    labels: Sequence[Tokens] = ()
    apply_softmax: bool = False
    temperature: float = 0.0
    length_normalized: bool = False
    kernel: inference_pb2.Kernel.ValueType = inference_pb2.KERNEL_UNSPECIFIED

    def forced(self, kernel: inference_pb2.Kernel.ValueType) -> "ScoreCase":
        return replace(self, kernel=kernel)

    @property
    def request(self) -> inference_pb2.ScoreRequest:
        request = inference_pb2.ScoreRequest(
            contexts=[inference_pb2.Context(tokens=blob(context)) for context in self.contexts],
            item_tokens=packed(self.items),
            item_context=self.item_context,
            kernel=self.kernel,
        )
        if self.labels:
            request.label_probabilities.CopyFrom(
                inference_pb2.LabelProbabilities(
                    label_tokens=packed(self.labels),
                    apply_softmax=self.apply_softmax,
                    temperature=self.temperature,
                )
            )
        else:
            request.log_likelihood.CopyFrom(
                inference_pb2.LogLikelihood(
                    token_logprobs=True, length_normalized=self.length_normalized
                )
            )
        return request

    def context_of(self, item: int) -> Tokens:
        return self.contexts[self.item_context[item] if self.item_context else 0]

    def assert_right(self, oracle: Oracle, answer: object) -> None:
        assert isinstance(answer, inference_pb2.ScoreResponse), answer
        assert not answer.errors
        if self.labels:
            self._assert_labels(oracle, answer)
        else:
            self._assert_likelihoods(oracle, answer)
        usage = answer.usage
        parts = usage.cached_tokens + usage.shared_tokens + usage.computed_tokens
        assert usage.prompt_tokens == parts
        if max(map(len, self.labels), default=1) == 1:
            alone = [len(self.context_of(i)) + len(item) for i, item in enumerate(self.items)]
            assert usage.prompt_tokens == sum(alone)

    def _assert_labels(self, oracle: Oracle, answer: inference_pb2.ScoreResponse) -> None:
        found = np.array(answer.scores, np.float64).reshape(list(answer.shape))
        assert found.shape == (len(self.items), len(self.labels))
        assert answer.over_labels == self.apply_softmax
        logprobs = self._label_logprobs(oracle)
        mass = np.exp(logprobs[:, self._counted_labels()]).sum(axis=1)
        np.testing.assert_allclose(answer.label_mass, mass, rtol=0, atol=TOLERANCE)
        if self.apply_softmax:
            weights = np.exp(logprobs / (self.temperature or 1.0))
            expected = weights / weights.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        else:
            longest = max(map(len, self.labels))
            np.testing.assert_allclose(np.log(found), logprobs, rtol=0, atol=TOLERANCE * longest)
            np.testing.assert_allclose(found, np.exp(logprobs), rtol=0, atol=TOLERANCE)

    def _label_logprobs(self, oracle: Oracle) -> Float64:  # [items, labels]
        return np.array(
            [
                [
                    oracle.token_logprobs([*self.context_of(i), *item], label).sum()
                    for label in self.labels
                ]
                for i, item in enumerate(self.items)
            ]
        )

    def _counted_labels(self) -> list[int]:
        """Those that continue no other label."""
        return [
            i
            for i, label in enumerate(self.labels)
            if not any(
                label is not other and list(label[: len(other)]) == list(other)
                for other in self.labels
            )
        ]

    def _assert_likelihoods(self, oracle: Oracle, answer: inference_pb2.ScoreResponse) -> None:
        offsets = list(answer.token_logprob_offsets)
        assert len(offsets) - 1 == len(answer.scores) == len(self.items)
        for i, item in enumerate(self.items):
            context = self.context_of(i)
            expected = oracle.token_logprobs(context, item)
            found = answer.token_logprobs[offsets[i] : offsets[i + 1]]
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
            divisor = len(expected) if self.length_normalized else 1
            allowed = TOLERANCE * len(expected) / divisor
            assert abs(answer.scores[i] - expected.sum() / divisor) <= allowed
            greedy = oracle.is_greedy(context, item)
            assert greedy is None or answer.is_greedy[i] == greedy
