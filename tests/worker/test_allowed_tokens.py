"""Draws from some tokens only."""

import numpy as np
import pytest
import torch
from tests.worker.draws import B28, allowed, draw, message
from tests.worker.plans import blob


def test_only_allowed_tokens_come_and_their_logits_stay() -> None:
    logits = torch.tensor([B28, B28, B28])
    samplers = [
        message(allowed_ids=blob([3, 1])),
        message(allowed_ids=blob([0, 2]), banned_ids=blob([0])),
        message(temperature=1.0, seed=2, top_k=3),
    ]
    drawn = draw(logits, samplers)
    assert drawn.tokens[:2].numpy().tolist() == [1, 2]
    assert drawn.logprobs[:2].numpy().tolist() == pytest.approx([-1.4402, -2.4402], abs=1e-4)
    assert drawn.tokens[2] == draw(logits[2:], samplers[2:]).tokens[0]
    params = message(temperature=0.9, seed=6, allowed_ids=blob([0, 2, 3]))
    tokens = draw(torch.tensor([B28]).expand(9000, -1), [params] * 9000, range(9000)).tokens
    counts = np.bincount(tokens.numpy(), minlength=4)
    kept = np.array(B28)
    kept[1] = -np.inf
    expected = allowed(kept, params) * 9000
    assert counts[1] == 0
    some = expected > 0
    assert ((counts - expected) ** 2 / np.where(some, expected, 1))[some].sum() < 13.8
