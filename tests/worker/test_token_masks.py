"""Masks of one step that leave some tokens to choose from."""

import numpy as np
import pytest
import torch
from tests.worker.draws import decode_plan, mask_of, message, samples_of
from tests.worker.plans import LIMITS
from tests.worker.tiny_model import CPU

from stemserve.worker.blobs import BadPlan
from stemserve.worker.sampling.params import decode_sampler
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.steps.step import decode_step


@pytest.mark.parametrize("vocab", [8, 13, 300])
@pytest.mark.parametrize("seed", range(3))
def test_a_mask_leaves_what_it_allows_for_one_step_only(seed: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(0, 3, (4, vocab)), dtype=torch.float32)
    sampler = Sampler(4, CPU)
    params = [message(slot, temperature=1.0, top_k=3, seed=slot) for slot in range(4)]
    params[3].temperature = 0.0
    sampler.admit([decode_sampler(each, slots=4, vocab_size=vocab) for each in params])
    free = sampler.draw(logits.clone(), samples_of(range(4), [0] * 4))
    legal = {slot: rng.choice(vocab, 2, replace=False) for slot in (1, 3)}
    sampler.mask(
        [mask_of(slot, ids, vocab, as_ids=slot % 2 == seed % 2) for slot, ids in legal.items()]
    )
    masked = sampler.draw(logits.clone(), samples_of(range(4), [0] * 4))
    assert not sampler.is_plain(samples_of(range(4), [0] * 4))[[1, 3]].any()
    for slot in range(4):
        token = int(masked.tokens[slot])
        if slot in legal:
            assert token in legal[slot]
        else:
            assert token == int(free.tokens[slot])
        raw = logits[slot].log_softmax(-1)[token]
        assert float(masked.logprobs[slot]) == pytest.approx(float(raw), abs=1e-5)
    assert int(masked.tokens[3]) == max(legal[3], key=lambda token: float(logits[3, token]))
    sampler.mask(())
    again = sampler.draw(logits.clone(), samples_of(range(4), [0] * 4))
    assert torch.equal(again.tokens, free.tokens)


def test_a_mask_of_another_size_or_for_no_sample_is_refused() -> None:
    plan = decode_plan(0).build()
    bits = bytes(-(-LIMITS.vocab_size // 8))
    plan.masks.add(slot=0, allowed=bits[1:])
    with pytest.raises(BadPlan, match="mask of slot 0"):
        decode_step(plan, LIMITS)
    plan.masks[0].allowed = bits
    assert decode_step(plan, LIMITS).masks
    plan.masks[0].allowed_ids = np.array([1, 2], "<i4").tobytes()
    with pytest.raises(BadPlan, match="bits beside its ids"):
        decode_step(plan, LIMITS)
    plan.masks[0].allowed = b""
    assert decode_step(plan, LIMITS).masks[0].ids.tolist() == [1, 2]
    plan.masks[0].allowed_ids = np.array([2, 2], "<i4").tobytes()
    with pytest.raises(BadPlan, match="that ascend"):
        decode_step(plan, LIMITS)
    plan.masks[0].allowed_ids = np.array([LIMITS.vocab_size], "<i4").tobytes()
    with pytest.raises(BadPlan, match="masks: allowed_ids"):
        decode_step(plan, LIMITS)
    plan.masks[0].allowed_ids = bytes(5)
    with pytest.raises(BadPlan, match="allowed_ids"):
        decode_step(plan, LIMITS)
    plan.masks[0].allowed_ids, plan.masks[0].allowed = b"", bits
    plan.masks[0].slot = 1
    with pytest.raises(BadPlan, match="not sampled"):
        decode_step(plan, LIMITS)
