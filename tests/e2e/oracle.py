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
NO_TOKEN = -1


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

    def beam_search(
        self, prompt: Sequence[int], *, end_ids: Collection[int], penalty: float, **options: object
    ) -> list[tuple[list[int], float]]:
        """Tokens and scores of the best sequences, by transformers' generate."""
        many = {"length_penalty": penalty} if options["num_beams"] != 1 else {}
        with torch.no_grad():
            found = self._model.generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                eos_token_id=sorted(end_ids) or [NO_TOKEN],
                pad_token_id=0,
                do_sample=False,
                return_dict_in_generate=True,
                output_scores=True,
                **many,
                **options,
            )
        rows = found.sequences[:, len(prompt) :].tolist()
        lengths = [
            next((n for n, token in enumerate(row, 1) if token in end_ids), len(row))
            for row in rows
        ]
        tokens = [row[:n] for row, n in zip(rows, lengths, strict=True)]
        if many:
            return list(zip(tokens, found.sequences_scores.tolist(), strict=True))
        return [(t, self.token_logprobs(prompt, t).sum() / len(t) ** penalty) for t in tokens]

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
