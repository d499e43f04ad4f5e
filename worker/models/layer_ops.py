"""What a model does between its matrix products and its attention: the seam of its devices."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.fused.heads import Heads
from stemserve.worker.models.linear import Linear, ProductWay


class PageWrites(Protocol):
    """Where the keys and values of a step's rows are kept."""

    slots: Tensor  # [rows] int32, page * page_size + place; -1: not stored

    def k_pages(self, layer: int) -> Tensor: ...  # [pages, page_size, kv_heads, head_dim]

    def v_pages(self, layer: int) -> Tensor: ...

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """The stored rows of k and v [rows, kv_heads, head_dim] into the layer's pages."""
        ...


class SplitHeads(Protocol):
    """Normed and rotated heads of a step's rows; their keys and values are in the pages."""

    def __call__(
        self,
        layer: int,
        qkv: Tensor,  # [rows, (query_heads + 2 * kv_heads) * head_dim]
        norm: Tensor | None,  # [query_heads + kv_heads, head_dim] gains
    ) -> Heads: ...


class Gathered(NamedTuple):
    """Log-probabilities over the full vocabulary, of chosen tokens at chosen rows."""

    logprobs: Tensor  # [chosen] float32
    argmax: Tensor  # [rows] int64, the lowest token on a tie
    likeliest: Tensor  # [rows] float32, the log-probability of argmax
    failed: Tensor  # [rows] bool: a logit is NaN or +inf


class Likeliest(NamedTuple):
    """The most likely token of each row."""

    tokens: Tensor  # [rows] int64, the lowest on a tie
    logprobs: Tensor  # [rows] float32; not finite where a logit is NaN or +inf


class LmHead(Protocol):
    def logits(self, hidden: Tensor) -> Tensor: ...  # [n, hidden] to float32 [n, vocab]

    def likeliest(self, hidden: Tensor) -> Likeliest:
        """Of hidden states [rows, hidden]; nothing here depends on the host, or waits for it."""
        ...

    def gather(
        self,
        hidden: Tensor,  # [rows, hidden]
        rows: NDArray[np.integer],  # [chosen]
        tokens: NDArray[np.integer],  # [chosen]
    ) -> Gathered: ...


@runtime_checkable
class DeviceGather(Protocol):
    """An LmHead whose gather needs nothing of the host, so that it can be captured."""

    most_rows: int  # that it gathers at once

    def gather_at(
        self,
        hidden: Tensor,  # [rows, hidden]
        rows: Tensor,  # [chosen] int32 or int64
        tokens: Tensor,  # [chosen] int32 or int64
    ) -> Gathered: ...


class LayerOps(Protocol):
    """Chosen once, for the device that holds the model."""

    product_way: ProductWay

    def product_ways(self, rows: int) -> int:
        """How many there are, for products of so many rows."""
        ...

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of [rows, hidden]."""
        ...

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of the sum of x and the residual, which becomes the sum."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * intermediate] to [rows, intermediate]: SiLU of the first half, times the
        second."""
        ...

    def heads(
        self,
        positions: Tensor,  # [rows]
        pages: PageWrites | None,  # None: nothing is stored
        into: Heads | None = None,  # where every layer's heads are put; None: somewhere new
    ) -> SplitHeads:
        """What all layers of a step share."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Of weights [out, in]; asked for in the order in which a step computes them."""
        ...

    def lm_head(self, weight: Tensor) -> LmHead:
        """Of weights [vocab, hidden]."""
        ...
