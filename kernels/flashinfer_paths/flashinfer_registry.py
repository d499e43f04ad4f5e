"""FlashInfer's strategies of a device."""

from collections.abc import Sequence

import torch

from stemserve.kernels.flashinfer_paths.flashinfer_backends import Backend
from stemserve.kernels.flashinfer_paths.flashinfer_cascade import FlashInferCascadeDecode
from stemserve.kernels.flashinfer_paths.flashinfer_runtime import flashinfer_runtime
from stemserve.kernels.flashinfer_paths.flashinfer_strategies import (
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
    shape: HeadShape, device: torch.device, dtype: torch.dtype, costs: Costs
) -> Sequence[Strategy]:
    """FlashInferUnavailable: FlashInfer cannot serve these heads on this device."""
    # A table that was measured without FlashInfer cannot tell its backends apart.
    measured = not isinstance(costs, CostTable) or all(b.value in costs.engines for b in Backend)
    runtime = flashinfer_runtime(shape, device, dtype, costs=costs if measured else None)
    return (
        FlashInferNaive(runtime),
        FlashInferRagged(runtime),
        FlashInferMultiItem(runtime),
        FlashInferCustomMask(runtime),
        FlashInferPaged(runtime),
        FlashInferCascadeDecode(runtime),
    )
