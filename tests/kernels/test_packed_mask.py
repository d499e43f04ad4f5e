"""Bits of explicit masks."""

import numpy as np
import pytest

from stemserve.kernels.layout import int32
from stemserve.kernels.torch_paths.packed_mask import Bool, PackedMask


def bits(*rows: str) -> Bool:
    return np.array([[bit == "1" for bit in row] for row in rows])


def test_b25_each_request_starts_at_a_byte() -> None:
    mask = PackedMask.pack([bits("101"), bits("11000", "11101")])
    assert mask.bits.tolist() == [5, 227, 2]
    assert mask.byte_indptr.tolist() == [0, 1, 3]


@pytest.mark.parametrize("seed", range(4))
def test_unpacking_returns_what_was_packed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    masks = [rng.random((rng.integers(0, 9), rng.integers(0, 20))) < 0.5 for _ in range(6)]
    packed = PackedMask.pack(masks)
    for request, mask in enumerate(masks):
        np.testing.assert_array_equal(packed.unpack(request), mask)


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 2 bytes"):
        PackedMask(
            bits=np.zeros(3, np.uint8),
            byte_indptr=int32([0, 2]),
            rows=int32([3]),
            tokens=int32([5]),
        )


def test_b25_offsets_in_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="byte offsets"):
        PackedMask(
            bits=np.zeros(2, np.uint8),
            byte_indptr=int32([0, 15]),
            rows=int32([3]),
            tokens=int32([5]),
        )


def test_b25_a_padded_batch_of_masks_is_refused() -> None:
    with pytest.raises(ValueError, match="rows, tokens"):
        PackedMask.pack([np.ones((2, 3, 3), np.bool_)])
