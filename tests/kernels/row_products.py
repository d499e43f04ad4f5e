"""Matrix products of Triton's interpreter that round a row alike in any place, as a GPU does."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@pytest.fixture(autouse=True)
def alike_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A BLAS rounds a row by its place among the others."""

    def matmul(a: Floats, b: Floats, dtype: type[np.float32]) -> Floats:
        product: Floats = np.einsum("ik,kj->ij", a.astype(dtype), b.astype(dtype))
        return product

    if not torch.cuda.is_available():
        monkeypatch.setattr(np, "matmul", matmul)
    yield
