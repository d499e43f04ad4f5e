"""How pages keep numbers: as they are computed, or as float8 that saturates."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def to_pages(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of any shape as pages of `dtype` keep them.

    What float8 cannot hold becomes its largest number; NaN stays.
    """
    if dtype == FP8:
        values = values.clamp(-FP8_MAX, FP8_MAX)
    return values.to(dtype)


def from_pages(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What pages keep, of any shape, as attention in `dtype` computes with it."""
    return stored if stored.dtype == dtype else stored.to(dtype)


def raw(pages: Tensor) -> Tensor:  # as `pages`, uint8 for float8
    """The pages for indexed writes, which torch does not have for float8: its bytes."""
    return pages.view(torch.uint8) if pages.dtype == FP8 else pages
