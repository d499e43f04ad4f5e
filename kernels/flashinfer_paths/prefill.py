"""Batches planned and run on a named backend of FlashInfer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stemserve.kernels.attention_state import AttentionState
from stemserve.kernels.flashinfer_paths.backends import Backend, Backends
from stemserve.kernels.flashinfer_paths.prefill_batch import PrefillBatch
from stemserve.kernels.flashinfer_paths.workspace import PlanSpace, Workspace
from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import HeadShape

LN2 = 0.6931471805599453  # FlashInfer's log-sum-exp is to base 2
ALIGNMENT = 16  # bytes
HEADS_IN_TOKENS = 0  # of its two layouts
NO_WINDOW = -1
DEPENDENT_LAUNCH = True  # the device prepares a kernel while the one before it ends


@dataclass(kw_only=True)
class PlannedPrefill:
    """A batch on the device; it holds its space of the workspace until it is dropped."""

    batch: PrefillBatch
    function: Callable[..., None]
    before: tuple[Any, ...] = ()  # q, k and v
    tables: tuple[Tensor, ...]
    after: tuple[Any, ...]  # out and lse


class Prefill:
    """Attention of batches; all plans of a device share a workspace and a stream."""

    def __init__(self, shape: HeadShape, backends: Backends, workspace: Workspace) -> None:
        self._shape = shape
        self._backends = backends
        self._workspace = workspace

    def plan(self, batch: PrefillBatch, backend: Backend, device: torch.device) -> PlannedPrefill:
        """Host work, and copies that nobody waits for."""
        module, tables = self._backends[backend], device_tables(batch, device)
        lists = ("row_indptr", "kv_indptr", "pages", "last_page_tokens")
        planned = PlannedPrefill(
            batch=batch,
            function=module.ragged_run if batch.pages is None else module.paged_run,
            tables=tuple(tables[name] for name in lists if name in tables),
            after=(mask_mode(batch), HEADS_IN_TOKENS, NO_WINDOW, DEPENDENT_LAUNCH)
            + self._numbers(batch, backend, tables),
        )
        space = self._workspace.space(planned)
        work_lists = module.plan(*self._plan_arguments(batch, backend, space))
        space.record()
        planned.before = (self._workspace.partial, space.device, work_lists)
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
        state = _new_state(q) if into is None else into
        planned.function(*planned.before, q, k, v, *planned.tables, *state, *planned.after)
        return state

    def _plan_arguments(
        self, batch: PrefillBatch, backend: Backend, space: PlanSpace
    ) -> tuple[Any, ...]:
        shape = self._shape
        buffers = (self._workspace.partial, space.device, space.host)
        requests = (_host(batch.row_indptr), _host(batch.kv_indptr), _host(batch.kv_tokens))
        sizes = (int(batch.rows.sum()), batch.requests, shape.query_heads, shape.kv_heads)
        page_size = 1 if batch.pages is None else batch.page_size
        head_dims = (shape.head_dim, shape.head_dim)
        no_graph = False
        division = (-1, False, 0) if backend is Backend.FA2 else ()  # as it sees fit
        return (
            *(*buffers, *requests, *sizes, page_size, no_graph),
            *(*head_dims, batch.causal, NO_WINDOW, *division),
        )

    def _numbers(
        self, batch: PrefillBatch, backend: Backend, tables: Mapping[str, Tensor]
    ) -> tuple[Any, ...]:
        """Arguments that the backends have in different orders."""
        items = tuple(tables.get(name) for name in ("prefix_tokens", "places", "longest_item"))
        width = 0 if batch.items is None else batch.items.places.shape[1]
        no_cap, scale, one = 0.0, self._shape.scale, 1.0
        if backend is Backend.FA3:
            v_scales = None
            return (*items, v_scales, no_cap, scale, one, width)
        no_alibi, no_scales = None, (None, None)
        masks = (tables.get("mask"), tables.get("mask_indptr"), no_alibi)
        rotary = (one, one)
        return (*masks, *items, *no_scales, no_cap, scale, *rotary, width)


def _new_state(q: Tensor) -> AttentionState:
    return AttentionState(q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32))


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
