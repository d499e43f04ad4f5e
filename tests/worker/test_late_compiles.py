"""What a GPU's worker says of kernels that are compiled once it serves."""

import logging
from importlib import import_module
from typing import Any

import pytest
import torch

from stemserve.worker.late_compiles import LateCompiles


def test_a_kernel_is_named_with_the_time_that_a_step_waited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    late = LateCompiles()
    with caplog.at_level(logging.INFO):
        late.begin(key="k", repr="merge[num_warps=1](x)", fn=None)
        late.end(key="k", repr="merge[num_warps=1](x)", fn=None)
    (record,) = caplog.records
    assert "a step waited 0 ms for Triton's merge[num_warps=1](x)" in record.getMessage()


@pytest.mark.gpu
def test_triton_tells_of_a_kernel_that_nobody_has_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stemserve.kernels.fused.gate import silu_mul

    runtime: Any = import_module("triton.knobs").runtime
    for hook in ("jit_cache_hook", "jit_post_compile_hook"):
        monkeypatch.setattr(runtime, hook, getattr(runtime, hook))
    with caplog.at_level(logging.INFO):
        LateCompiles().watch()
        for _ in range(2):
            silu_mul(torch.ones((3, 2 * 176), dtype=torch.bfloat16, device="cuda"))
    assert len([r for r in caplog.records if "a step waited" in r.getMessage()]) == 1
