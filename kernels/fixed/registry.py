"""The strategies of deterministic attention: one for each phase."""

from collections.abc import Sequence

import torch

from stemserve.kernels.fixed.blocks import FixedBlocks
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.strategy import Phase, Strategy

# Tokens of a row in each partial result. Fewer are faster in decode, more in prefill: docs/log.md.
FIXED_SPLIT = 1024


def fixed_strategies(
    shape: HeadShape, device: torch.device, dtype: torch.dtype
) -> Sequence[Strategy]:
    if device.type != "cuda":
        return [FixedBlocks(shape, device, phase) for phase in Phase]
    # Here, so that a host without a GPU does without Triton.
    from stemserve.kernels.codec.decode import CodecDecode, DecodeNumbers
    from stemserve.kernels.codec.division import Division
    from stemserve.kernels.fixed.tree import FixedTree

    numbers, division = DecodeNumbers(dtype=dtype), Division(fixed_split=FIXED_SPLIT)
    prefill, decode = (
        CodecDecode(shape, device, numbers, phase=phase, division=division)
        for phase in (Phase.PREFILL, Phase.DECODE)
    )
    return FixedTree(prefill), decode
