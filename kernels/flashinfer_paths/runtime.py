"""What the FlashInfer strategies of one model on one device share."""

from dataclasses import dataclass
from typing import Any

import torch

from stemserve.kernels.flashinfer_paths.backends import Backend, load_backends
from stemserve.kernels.flashinfer_paths.costs import StrategyCosts, TileCosts
from stemserve.kernels.flashinfer_paths.prefill import Prefill
from stemserve.kernels.flashinfer_paths.workspace import Workspace, partial_bytes
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.page_gather import TokenScratch

SCRATCH_BYTES = 1 << 30  # of copied K and V; what would copy more is refused


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferRuntime:
    shape: HeadShape
    device: torch.device
    prefill: Prefill
    scratch: TokenScratch
    costs: StrategyCosts
    backends: tuple[Backend, ...]  # that may be chosen
    widens: bool = False  # pages keep float8: they are copied, and never read as they are


def flashinfer_runtime(
    shape: HeadShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    costs: StrategyCosts | None = None,
    backends: tuple[Backend, ...] = tuple(Backend),
    widens: bool = False,
) -> FlashInferRuntime:
    """With those of the `backends` that the device has; without `costs`, TileCosts chooses.

    FlashInferUnavailable: FlashInfer cannot serve these heads on this device.
    """
    loaded = load_backends(shape, device, dtype, backends)
    token_bytes = 2 * shape.kv_heads * shape.head_dim * dtype.itemsize
    cuda: Any = torch.cuda
    processors: int = cuda.get_device_properties(device).multi_processor_count
    workspace = Workspace(device, partial_bytes(shape, processors))
    return FlashInferRuntime(
        shape=shape,
        device=device,
        prefill=Prefill(shape, loaded, workspace),
        scratch=TokenScratch(shape, device, dtype, max_tokens=SCRATCH_BYTES // token_bytes),
        costs=costs or TileCosts(shape, processors),
        backends=tuple(loaded),
        widens=widens,
    )
