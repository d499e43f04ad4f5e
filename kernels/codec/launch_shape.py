"""How the tree kernel in Triton is launched for heads of some size; no Triton is needed to know."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """How a head of some bytes is best read (H200)."""

    resident: int  # CTAs an SM
    stages: int  # steps in shared memory
    warps: int
    registers: int | None = None


NARROW = LaunchShape(resident=2, stages=3, warps=4)  # to 256 bytes a head
WIDE = LaunchShape(resident=1, stages=2, warps=8)  # to 512
WIDEST = LaunchShape(resident=1, stages=1, warps=8)


def padded_dim(head_dim: int) -> int:
    """The least power of two that holds a head, and a matrix product's least size."""
    return max(16, 1 << (head_dim - 1).bit_length())


def shape_of(head_bytes: int) -> LaunchShape:
    """For so many bytes of a padded head."""
    return NARROW if head_bytes <= 256 else WIDE if head_bytes <= 512 else WIDEST
