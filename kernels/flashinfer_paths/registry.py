"""FlashInfer's strategies of a device."""

from collections.abc import Sequence

import torch

from stemserve.kernels.flashinfer_paths.backends import Backend
from stemserve.kernels.flashinfer_paths.cascade import FlashInferCascadeDecode
from stemserve.kernels.flashinfer_paths.runtime import flashinfer_runtime
from stemserve.kernels.flashinfer_paths.strategies import (
    FlashInferCustomMask,
    FlashInferMultiItem,
    FlashInferNaive,
    FlashInferPaged,
    FlashInferRagged,
)
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.pricing.cost_model import Costs, CostTable
from stemserve.kernels.strategy import Strategy


def flashinfer_strategies(
    shape: HeadShape,
    device: torch.device,
    dtype: torch.dtype,
    costs: Costs,
    *,
    page_dtype: torch.dtype,
) -> Sequence[Strategy]:
    """Those that read the pages as they are only where pages keep `dtype`.

    FlashInferUnavailable: FlashInfer cannot serve these heads on this device.
    """
    # A table that was measured without FlashInfer cannot tell its backends apart.
    measured = not isinstance(costs, CostTable) or all(b.value in costs.engines for b in Backend)
    widens = page_dtype != dtype
    runtime = flashinfer_runtime(
        shape, device, dtype, costs=costs if measured else None, widens=widens
    )
    copying = (
        FlashInferNaive(runtime),
        FlashInferRagged(runtime),
        FlashInferMultiItem(runtime),
        FlashInferCustomMask(runtime),
    )
    if widens:
        return copying
    return (*copying, FlashInferPaged(runtime), FlashInferCascadeDecode(runtime))
