"""FlashInfer's batched prefill, by the name of its backend."""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import torch

from stemserve.kernels.layout import HeadShape

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 128, 256)
FA3_HEAD_DIMS = (128,)  # it has 64 and 256 too, which were not compared with the oracle
DTYPES = (torch.float16, torch.bfloat16)


class Backend(StrEnum):
    """`auto` is none: on a Hopper it is fa3, which is several times slower for short rows."""

    FA2 = "fa2"  # rows x heads of a group in a tile; divides tokens over idle multiprocessors
    FA3 = "fa3"  # Hopper: tiles of 128 rows of one head, twice the rate


class FlashInferUnavailable(RuntimeError):
    """FlashInfer cannot serve these heads on this device."""


class PrefillModule(Protocol):
    """The compiled functions of one backend, dtype and head_dim.

    They are called directly: FlashInfer's wrappers of them take the host more time a layer than the
    functions do, and wait for the device while they plan.
    """

    plan: Callable[..., Any]
    paged_run: Callable[..., None]
    ragged_run: Callable[..., None]


Backends = Mapping[Backend, PrefillModule]


def unavailable(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot be used, or None if it can."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device}"
    if dtype not in DTYPES:
        return f"it has no kernels in {dtype}"
    if shape.head_dim not in HEAD_DIMS:
        return f"it has no kernels for head_dim {shape.head_dim}"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed (pip install 'stemserve[cuda]')"
    return None


def load_backends(
    shape: HeadShape,
    device: torch.device,
    dtype: torch.dtype,
    wanted: Sequence[Backend] = tuple(Backend),
) -> Backends:
    """Loads the wanted modules that the device has; compiles those that were not yet: minutes.

    FlashInferUnavailable: see `unavailable`, or the modules cannot be compiled.
    """
    reason = unavailable(shape, device, dtype)
    if reason is not None:
        raise FlashInferUnavailable(reason)
    hopper = torch.cuda.get_device_capability(device)[0] == 9
    fa3 = hopper and shape.head_dim in FA3_HEAD_DIMS
    names = [name for name in wanted if fa3 or name is not Backend.FA3]
    try:
        return {name: _load(name, shape.head_dim, dtype) for name in names}
    except (ImportError, OSError, RuntimeError) as error:
        raise FlashInferUnavailable(f"its modules do not load: {error}") from error


def _load(backend: Backend, head_dim: int, dtype: torch.dtype) -> PrefillModule:
    log.info("loading FlashInfer's %s for head_dim %d in %s", backend, head_dim, dtype)
    no_rope, no_window, no_soft_cap, fp32_scores = 0, False, False, False
    flashinfer: Any = importlib.import_module("flashinfer.jit")
    program = flashinfer.gen_batch_prefill_module(
        backend.value,
        *(dtype, dtype, dtype, torch.int32),
        *(head_dim, head_dim),
        *(no_rope, no_window, no_soft_cap, fp32_scores),
    )
    module: PrefillModule = program.build_and_load()
    return module
