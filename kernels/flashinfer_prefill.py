"""Batches planned and run on a named backend of FlashInfer."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.flashinfer_backends import Backend, Backends
from stemserve.kernels.flashinfer_workspace import PlanSpace, Workspace
from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import HeadShape
from stemserve.kernels.prefill_batch import PrefillBatch

LN2 = 0.6931471805599453  # FlashInfer's log-sum-exp is to base 2
ALIGNMENT = 16  # bytes


@dataclass(kw_only=True)
class PlannedPrefill:
    """A batch on the device; it holds its space of the workspace until it is dropped."""

    backend: Backend
    batch: PrefillBatch
    tables: dict[str, Tensor]
    work_lists: Any = None  # of FlashInfer
    space: PlanSpace | None = None


class Prefill:
    """Attention of batches; all plans of a device share a workspace and a stream."""

    def __init__(self, shape: HeadShape, backends: Backends, workspace: Workspace) -> None:
        self._shape = shape
        self._backends = backends
        self._workspace = workspace

    @property
    def backends(self) -> tuple[Backend, ...]:
        return tuple(self._backends)

    def plan(self, batch: PrefillBatch, backend: Backend, device: torch.device) -> PlannedPrefill:
        """Host work, and copies that nobody waits for."""
        planned = PlannedPrefill(backend=backend, batch=batch, tables=device_tables(batch, device))
        space = planned.space = self._workspace.space(planned)
        shape = self._shape
        head_dims = (shape.head_dim, shape.head_dim)
        page_size = 1 if batch.pages is None else batch.page_size
        dividing = (-1, False, 0) if backend is Backend.FA2 else ()  # as its plan sees fit
        planned.work_lists = self._backends[backend].plan(
            self._workspace.partial,
            space.device,
            space.host,
            _host(batch.row_indptr),
            _host(batch.kv_indptr),
            _host(batch.kv_tokens),
            int(batch.rows.sum()),
            batch.requests,
            shape.query_heads,
            shape.kv_heads,
            page_size,
            False,  # no CUDA graph
            *head_dims,
            batch.causal,
            -1,  # no window
            *dividing,
        )
        space.record()
        return planned

    def run(
        self,
        planned: PlannedPrefill,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        into: AttentionState | None = None,
    ) -> AttentionState:
        """k, v: pages [pages, page_size, kv_heads, head_dim], or without pages the tokens.

        Rows that see nothing have any result. `lse` is to base 2.
        """
        batch, module = planned.batch, self._backends[planned.backend]
        out, lse = _new_state(q) if into is None else into
        tables = planned.tables
        head = (self._workspace.partial, _device(planned), planned.work_lists, q, k, v)
        ends = (out, lse, mask_mode(batch), 0, -1, True)  # heads within tokens, no window
        masks = (tables.get("mask"), tables.get("mask_indptr"), None)
        items = (tables.get("prefix_tokens"), tables.get("places"), tables.get("longest_item"))
        width = 0 if batch.items is None else batch.items.places.shape[1]
        scale = self._shape.scale
        indptrs = (tables["row_indptr"], tables["kv_indptr"])
        if batch.pages is None:
            module.ragged_run(*head, *indptrs, *ends, *masks, *items, 0.0, scale, 1.0, 1.0, width)
        else:
            pages = (tables["pages"], tables["last_page_tokens"])
            no_scales = (None, None, None)
            module.paged_run(
                *head, *indptrs, *pages, *ends, *masks, *items,
                0.0, scale, *no_scales, 1.0, 1.0, width, 0,
            )  # fmt: skip
        return AttentionState(out, lse)


def _new_state(q: Tensor) -> AttentionState:
    return AttentionState(
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:2], dtype=torch.float32, device=q.device),
    )


def mask_mode(batch: PrefillBatch) -> int:
    """FlashInfer's number."""
    if batch.items is not None:
        return 3
    if batch.mask is not None:
        return 2
    return int(batch.causal)


def device_tables(batch: PrefillBatch, device: torch.device) -> dict[str, Tensor]:
    """The arrays of the batch in one copy, as int32 whatever they hold."""
    arrays: dict[str, NDArray[Any]] = {
        "row_indptr": batch.row_indptr,
        "kv_indptr": batch.kv_indptr,
    }
    if batch.pages is not None:
        arrays |= {"pages": batch.pages, "last_page_tokens": batch.last_page_tokens}
    if batch.items is not None:
        arrays["prefix_tokens"] = batch.items.prefix_tokens
        arrays["places"] = batch.items.places
        arrays["longest_item"] = batch.items.longest_item
    if batch.mask is not None:
        arrays |= {"mask": batch.mask.bits, "mask_indptr": batch.mask.byte_indptr}
    return packed_tensors(arrays, device)


def packed_tensors(arrays: dict[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """Views of one buffer; each is as long as its array, in int32 words."""
    raw = {
        name: np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for name, array in arrays.items()
    }
    buffer = np.concatenate(
        [part for array in raw.values() for part in (array, _padding(len(array)))]
    )
    words = device_tensor(buffer.view(np.int32), device)
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, array in raw.items():
        stop = start + -(-len(array) // 4)
        tensors[name] = words[start:stop]
        start += (len(array) + len(_padding(len(array)))) // 4
    return tensors


def _padding(size: int) -> NDArray[np.uint8]:
    return np.zeros(-size % ALIGNMENT, np.uint8)


def _host(array: NDArray[np.int32]) -> Tensor:
    tensor: Tensor = torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
    return tensor


def _device(planned: PlannedPrefill) -> Tensor:
    assert planned.space is not None
    return planned.space.device
