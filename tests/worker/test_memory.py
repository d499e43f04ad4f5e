"""Who gets the memory of a device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.worker.tiny_model import CPU, make_runner, save_tiny_model, step_limits

from stemserve.worker.blobs import decode_int32
from stemserve.worker.config import ConfigError
from stemserve.worker.memory.budget import (
    GIB,
    GpuMemory,
    KvRoom,
    cpu_kv_room,
    free_bytes,
    is_shortage,
    kv_pages,
)
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.memory.trial_steps import trial_pages, trial_steps
from stemserve.worker.steps.step import decode_step

ROOM = KvRoom(default=1000, most=3000, advice="ask for less")
MEMORY = GpuMemory(
    total=100 * GIB, others=1 * GIB, weights=20 * GIB, activations=3 * GIB, graphs=2 * GIB
)


def test_a_kv_cache_of_given_bytes_has_as_many_pages_as_fit() -> None:
    assert kv_pages(None, 1000, 300, ROOM) == 3
    assert kv_pages(7, None, 300, ROOM) == 7
    assert kv_pages(None, None, 300, ROOM) == 3


def test_a_kv_cache_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"not enough memory: 11 KV pages.*ask for less"):
        kv_pages(11, None, 300, ROOM)
    with pytest.raises(ConfigError, match="no room for one page"):
        kv_pages(None, 299, 300, ROOM)


def test_on_a_cpu_the_kv_cache_takes_a_share_of_the_free_memory() -> None:
    page = 1 << 20
    assert 0 < kv_pages(None, None, page, cpu_kv_room()) * page <= free_bytes(CPU) // 3


def test_on_a_gpu_the_kv_cache_takes_what_the_others_leave() -> None:
    assert MEMORY.kv_room(0.9, "").default == 64 * GIB
    assert MEMORY.kv_room(0.9, "").most == 64 * GIB
    assert MEMORY.kv_room(0.25, "").most == 0


def test_a_gpu_that_is_full_is_an_error_that_says_of_what() -> None:
    room = MEMORY.kv_room(0.26, "pass a larger --gpu-memory-utilization")
    assert room.most == 0
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization.*weights 20\.00 GiB"):
        kv_pages(None, None, 300, room)
    with pytest.raises(ConfigError, match=r"not enough.*--gpu-memory-utilization"):
        kv_pages(1, None, 300, room)


def test_torch_and_numpy_say_that_memory_is_short() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(1 << 50)
    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 50, np.float64)
    assert is_shortage(torchs.value)
    assert is_shortage(numpys.value)
    assert is_shortage(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_shortage(RuntimeError("a shape is wrong"))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"context_tokens": 1},
        {"context_tokens": 7},
        {"max_step_tokens": 1},
        {"max_step_tokens": 3, "sampler_slots": 8},
        {"page_size": 16},
        {"context_tokens": 100, "max_step_tokens": 33},
    ],
)
def test_trial_steps_are_plans_of_all_rows(change: dict[str, Any]) -> None:
    limits = replace(step_limits(4), **change)
    limits = replace(limits, kv_pages=trial_pages(limits))
    rows = [decode_step(plan, limits).num_rows for plan in trial_steps(limits)]
    assert max(rows) == limits.max_step_tokens
    assert rows[-1] == min(limits.sampler_slots, limits.max_step_tokens)


def test_trial_steps_run(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=3)
    tiny = make_runner(tmp_path)
    limits = step_limits(4)
    assert trial_pages(limits) <= limits.kv_pages
    for plan in trial_steps(limits):
        result = tiny.runner.step(plan)
        assert not len(decode_int32("", result.failed_rows))
        assert len(result.gather_argmax) == len(plan.gather_rows)


def test_layers_may_share_their_pages_in_a_trial(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, seed=3)
    pool = KvPool(make_runner(tmp_path).pool.shape, CPU, stored_layers=1)
    pool.write(2, torch.tensor([5]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    assert pool.k_pages(0).data_ptr() == pool.k_pages(2).data_ptr()
    assert pool.v_pages(1).sum() == 16
