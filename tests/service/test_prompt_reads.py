"""Prompts whose tokens' log-probabilities are read, through the batcher and a literal worker."""

import numpy as np
import pytest
from tests.service.batcher_rig import make_rig
from tests.service.toy_jobs import again, generate_job, label_job, random_tokens, run_right
from tests.service.toy_model import logprobs_of, state_of

from stemserve.service.batching.steps.plan_arrays import unpack_int32
from stemserve.service.errors import EngineFault
from stemserve.service.request import Float32, Realm


def expected(prompt: list[int]) -> Float32:
    values = [logprobs_of(state_of(prompt[:at]))[prompt[at]] for at in range(1, len(prompt))]
    return np.array(values, np.float32)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 50])
@pytest.mark.parametrize("stored", [0, 1, 16, 20, 50])
def test_all_rows_run_and_only_those_that_are_not_stored_are_stored(
    length: int, stored: int
) -> None:
    rig = make_rig()
    prompt = random_tokens(length, length)
    if stored:
        run_right(rig, label_job("before", [prompt[:stored]], [[1]], [0, 2]))
    rig.plans.clear()
    job = generate_job("g", prompt, samples=2, max_new_tokens=4, prompt_logprobs=True)
    usage = run_right(rig, job)[0]
    assert (usage.cached_tokens, usage.computed_tokens) == (0, length)
    last = rig.answers["g"].last
    assert last is not None and last.prompt_logprobs is not None
    np.testing.assert_array_equal(last.prompt_logprobs, expected(prompt))
    kept = [int((unpack_int32(plan.kv_slots) >= 0).sum()) for plan in rig.plans]
    assert sum(kept) >= length - min(stored, length)
    usage = run_right(rig, again(job, 1))[0]
    assert (usage.cached_tokens, usage.computed_tokens) == (0, length)


@pytest.mark.parametrize("at", [0, 15, 16, 30])
def test_a_prompt_with_a_token_that_cannot_be_read_fails_and_is_not_kept_from_there(
    at: int,
) -> None:
    rig = make_rig()
    prompt = random_tokens(1, 40)
    rig.worker.bad_states = {state_of(prompt[: at + 1])}
    rig.run(generate_job("g", prompt, prompt_logprobs=True))
    error = rig.answers["g"].error
    assert isinstance(error, EngineFault) and "a token of the prompt" in str(error)
    assert rig.batcher.resident_tokens(np.array(prompt, np.int32), Realm()) == at // 16 * 16
    rig.batcher.check_idle()
