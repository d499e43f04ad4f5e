"""What transformers says of one sequence at a time, without a cache."""

from collections.abc import Collection, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
DECISIVE = 1e-4  # a lead of the best token over the second that rounding does not turn
SEQUENCES_KEPT = 200


class Oracle:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], Float64] = {}

    def in_type(self, dtype: torch.dtype) -> "Oracle":
        """The same model in another number format, with what that loses."""
        return Oracle(deepcopy(self._model).to(dtype))

    def logits(self, tokens: Sequence[int]) -> Float64:
        """[tokens, vocab] of a model with an LM head, [classes] of one with a classifier."""
        key = tuple(tokens)
        if key not in self._known:
            if len(self._known) >= SEQUENCES_KEPT:
                self._known.clear()
            with torch.no_grad():
                logits = self._model(torch.tensor([key]), use_cache=False).logits[0]
            self._known[key] = logits.double().numpy()
        return self._known[key]

    def logprobs(self, tokens: Sequence[int]) -> Float64:  # [tokens, vocab]
        logits = self.logits(tokens)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        logprobs: Float64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return logprobs

    def token_logprobs(self, before: Sequence[int], tokens: Sequence[int]) -> Float64:
        """Of each token; not of the first where nothing is before it."""
        skipped = 0 if len(before) else 1
        rows = self.logprobs([*before, *tokens])[len(before) + skipped - 1 : -1]
        picked: Float64 = rows[np.arange(len(rows)), list(tokens[skipped:])]
        return picked

    def is_greedy(self, before: Sequence[int], tokens: Sequence[int]) -> bool | None:
        """None: a matter of rounding."""
        skipped = 0 if len(before) else 1
        rows = self.logprobs([*before, *tokens])[len(before) + skipped - 1 : -1]
        lead = rows.max(axis=-1) - self.token_logprobs(before, tokens)
        if lead.max() > DECISIVE:
            return False
        return True if all(map(decided, rows)) else None

    def greedy(
        self, prompt: Sequence[int], count: int, *, banned: Collection[int] = ()
    ) -> list[int] | None:
        """The next tokens; None where the lead of one is a matter of rounding."""
        tokens = list(prompt)
        for _ in range(count):
            row = self.logits(tokens)[-1].copy()
            row[list(banned)] = -np.inf
            if not decided(row):
                return None
            tokens.append(int(row.argmax()))
        return tokens[len(prompt) :]


def decided(row: Float64) -> bool:  # [vocab]
    second, first = np.partition(row, -2)[-2:]
    return bool(first - second > DECISIVE)
