"""Every strategy that this package has for a device, by phase and kernel."""

from collections.abc import Sequence

import torch

from stemserve.kernels.cascade import CascadeAttention
from stemserve.kernels.codec import CodecAttention
from stemserve.kernels.codec_plan import CodecLimits
from stemserve.kernels.cost_model import Costs
from stemserve.kernels.custom_mask import CustomMaskAttention
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.multi_item import MultiItemAttention
from stemserve.kernels.naive import NaiveAttention
from stemserve.kernels.paged import PagedAttention
from stemserve.kernels.ragged import RaggedAttention
from stemserve.kernels.split import SplitAttention
from stemserve.kernels.strategy import Kernel, Phase, Strategy


def strategies(
    shape: HeadShape,
    *,
    device: torch.device,
    dtype: torch.dtype,
    costs: Costs,
    limits: CodecLimits | None = None,
) -> dict[tuple[Phase, Kernel], Strategy]:
    """`limits` of the torch codec's task division; None: the device runs one task at a time.

    One task is the case of a CPU, where each call is spread over all threads.
    """
    task_limits = limits or CodecLimits(workers=1)
    available: Sequence[Strategy] = (
        NaiveAttention(shape, device),
        SplitAttention(shape, device),
        RaggedAttention(shape, device),
        CascadeAttention(shape, device, Phase.PREFILL),
        MultiItemAttention(shape, device),
        CustomMaskAttention(shape, device),
        PagedAttention(shape, device),
        CascadeAttention(shape, device, Phase.DECODE),
        *(_codec(shape, device, dtype) or [CodecAttention(shape, device, costs, task_limits)]),
    )
    return {(strategy.phase, strategy.kernel): strategy for strategy in available}


def _codec(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> Sequence[Strategy]:
    """The tree kernel in Triton; nothing on a CPU, where Triton need not be installed."""
    if device.type != "cuda":
        return ()
    from stemserve.kernels.codec_decode import CodecDecode, DecodeNumbers

    numbers = DecodeNumbers(dtype=dtype)
    return [CodecDecode(shape, device, numbers, phase=phase) for phase in Phase]
