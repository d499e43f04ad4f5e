"""What sampler slots keep from step to step, and when they may be read."""

import numpy as np
import pytest
import torch
from tests.worker.draws import B28, decode_plan, message, samples_of
from tests.worker.plans import LIMITS, blob
from tests.worker.tiny_model import CPU

from stemserve.kernels.layout import int32
from stemserve.worker.blobs import BadPlan, encode_float32
from stemserve.worker.sampling.params import decode_sampler
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.steps.reads import Samples
from stemserve.worker.steps.step import decode_step


def test_sampled_tokens_feed_later_steps_from_their_slots() -> None:
    sampler = Sampler(4, CPU)
    sampler.admit([decode_sampler(message(slot), slots=4, vocab_size=4) for slot in (2, 3)])
    logits = torch.tensor([[0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0]])
    sampler.draw(logits, samples_of([3, 2], [0, 0]))
    assert sampler.tables.token_ids(torch.tensor([40, -1 - 2, -1 - 3])).numpy().tolist() == [
        40,
        3,
        1,
    ]


def test_a_slot_that_was_never_set_up_is_refused() -> None:
    sampler = Sampler(4, CPU)
    step = decode_step(decode_plan(1).build(), LIMITS)
    with pytest.raises(BadPlan, match="no sampler was sent for slot 1"):
        sampler.check(step)


def test_a_slot_without_a_token_cannot_be_read() -> None:
    sampler = Sampler(4, CPU)
    plan = decode_plan(1)
    plan.samplers = [message(1)]
    step = decode_step(plan.build(), LIMITS)
    with pytest.raises(BadPlan, match="no token was sampled into slot 1"):
        sampler.check(step)
    sampler.admit(step.samplers)
    with pytest.raises(BadPlan, match="no token was sampled into slot 1"):
        sampler.check(step)


@pytest.mark.parametrize(
    ("fields", "index", "expected"),
    [
        ({}, 0, True),
        ({"temperature": 1e-6, "top_k": 5, "seed": 3}, 0, True),
        ({"temperature": 0.5}, 0, False),
        ({"bias_ids": blob([1]), "bias_values": encode_float32(np.ones(1, np.float32))}, 0, False),
        ({"banned_ids": blob([2])}, 0, False),
        ({"min_tokens_banned_ids": blob([2]), "min_new_tokens": 4}, 3, False),
        ({"min_tokens_banned_ids": blob([2]), "min_new_tokens": 4}, 4, True),
        ({"top_logprobs": 2}, 0, False),
        ({"allowed_ids": blob([2])}, 0, False),
        ({"repetition_penalty": 1.1}, 0, False),
        ({"repetition_penalty": 1.0}, 0, True),
        ({"presence_penalty": 0.1}, 0, False),
        ({"frequency_penalty": -0.1}, 0, False),
    ],
)
def test_only_a_plain_greedy_sample_needs_no_logits_of_other_tokens(
    fields: dict[str, object], index: int, expected: bool
) -> None:
    sampler = Sampler(LIMITS.sampler_slots, CPU)
    params = message(2, **fields)
    sampler.admit([decode_sampler(params, slots=LIMITS.sampler_slots, vocab_size=9)])
    samples = Samples(rows=int32([0]), slots=int32([2]), index=int32([index]))
    assert sampler.takes_likeliest(samples).item() is expected


def test_a_taken_token_is_the_next_input_of_its_slot() -> None:
    sampler = Sampler(3, CPU)
    tokens = torch.tensor([7, 9])
    nothing = torch.zeros(2)
    drawn = sampler.take(tokens, nothing, nothing.bool(), int32([2, 0]))
    assert drawn.top_ids.shape == drawn.top_logprobs.shape == (2, 0)
    assert sampler.tables.token_ids(torch.tensor([-1, -3, 5])).numpy().tolist() == [9, 7, 5]


def test_a_slot_that_is_set_up_anew_forgets_its_edits() -> None:
    sampler = Sampler(2, CPU)
    logits = torch.tensor([B28])
    first = message(1, banned_ids=blob([0]), top_logprobs=2)
    for params, token, columns in [(first, 1, 2), (message(1), 0, 0)]:
        sampler.admit([decode_sampler(params, slots=2, vocab_size=4)])
        drawn = sampler.draw(logits, samples_of([1], [0]))
        assert drawn.tokens.numpy().tolist() == [token]
        assert drawn.top_ids.shape == (1, columns)
    assert logits.numpy().tolist() == [B28]
