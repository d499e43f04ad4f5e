"""Numbers of rows for which decode steps are captured."""

from collections.abc import Sequence

SMALL = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
STEP = 128  # beyond these


def row_buckets(most: int) -> list[int]:
    """Ascending; the last is `most`."""
    if most < 1:
        return []
    every = [*SMALL, *range(SMALL[-1] + STEP, most + 1, STEP)]
    return [*(bucket for bucket in every if bucket < most), most]


def bucket_of(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest that holds the rows; None: none does. Buckets ascend."""
    return next((bucket for bucket in buckets if bucket >= rows), None)
