"""The device of a worker, and the numbers that it computes with and keeps."""

from typing import Any, assert_never

import torch

from stemserve.kernels.codec.tiles import PAGE_SIZES
from stemserve.kernels.page_format import FP8
from stemserve.worker.config import ConfigError, Device, Dtype, KvCacheDtype

FP8_CAPABILITY = (8, 9)
MOST_PAGE_TOKENS = 1024  # on a CPU; a partly filled page wastes what it does not hold


def pick_device(choice: Device) -> torch.device:
    has_gpu = torch.cuda.is_available()
    match choice:
        case Device.AUTO:
            return torch.device("cuda" if has_gpu else "cpu")
        case Device.CPU:
            return torch.device("cpu")
        case Device.CUDA:
            if not has_gpu:
                raise ConfigError("--device cuda: torch finds no GPU")
            return torch.device("cuda")
        case _:
            assert_never(choice)


def check_page_size(size: int, device: torch.device) -> None:
    """Raises ConfigError. A CPU's kernels take any size, the tree kernel of a GPU some."""
    if device.type == "cpu":
        if not 1 <= size <= MOST_PAGE_TOKENS:
            raise ConfigError(f"--page-size {size} is not in 1 .. {MOST_PAGE_TOKENS}")
    elif size not in PAGE_SIZES:
        allowed = ", ".join(map(str, PAGE_SIZES))
        raise ConfigError(f"--page-size {size} is not one of {allowed}, which a GPU takes")


def pick_dtype(choice: Dtype, device: torch.device) -> torch.dtype | None:
    """None: the checkpoint's."""
    match choice:
        case Dtype.AUTO:
            return torch.float32 if device.type == "cpu" else None
        case Dtype.FLOAT32:
            return torch.float32
        case Dtype.BFLOAT16:
            return torch.bfloat16
        case Dtype.FLOAT16:
            return torch.float16
        case _:
            assert_never(choice)


def page_dtype(choice: KvCacheDtype, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of the KV cache of a model of some dtype."""
    match choice:
        case KvCacheDtype.AUTO:
            return dtype
        case KvCacheDtype.FP8_E4M3:
            cuda: Any = torch.cuda  # partly untyped
            if device.type == "cuda" and cuda.get_device_capability(device) < FP8_CAPABILITY:
                raise ConfigError("--kv-cache-dtype fp8_e4m3: this GPU has no float8")
            return FP8
        case _:
            assert_never(choice)
