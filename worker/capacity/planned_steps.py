"""The steps that calls are run in, as layouts of attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stemserve.kernels.layout import AttentionLayout, int32
from stemserve.kernels.token_sources import indptr
from stemserve.worker.capacity.workload import Workload
from stemserve.worker.config import PAGE_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """What a step computes of one call."""

    stored: int  # tokens of the prefix that are stored when the step ends
    prefix_rows: int = 0  # the last of them, computed in it
    items: int = 0
    item_tokens: int = 0

    @property
    def rows(self) -> int:
        return self.prefix_rows + self.items * self.item_tokens


Step = tuple[Tree, ...]


def planned_steps(workload: Workload, calls: int, step_rows: int) -> list[Step]:
    """Of calls that come at once; the first of them find no prefix, as the hit rate says.

    Steps are filled up to `step_rows`; an item lies in one step.
    """
    misses = calls - round(calls * workload.hit_rate)
    steps: list[list[Tree]] = [[]]
    room = step_rows
    for number in range(calls):
        for tree in _pieces(workload, cached=number >= misses, step_rows=step_rows):
            for part in _cut(tree, room, step_rows):
                if part.rows > room:
                    steps.append([])
                    room = step_rows
                steps[-1].append(part)
                room -= part.rows
    return [_joined(step) for step in steps if step]


def _pieces(workload: Workload, *, cached: bool, step_rows: int) -> Iterator[Tree]:
    """The last token of a cached prefix is run again where its prediction is read."""
    prefix = workload.prefix_tokens
    rows = prefix if not cached else int(workload.generates or workload.token_logprobs)
    if rows:
        yield Tree(stored=prefix, prefix_rows=rows)
    if workload.items:
        tokens = min(workload.item_tokens, step_rows)
        yield Tree(stored=prefix, items=workload.items, item_tokens=tokens)


def _cut(tree: Tree, room: int, step_rows: int) -> Iterator[Tree]:
    """Parts that fit: the first into what is left of a step, the next into whole ones."""
    first = tree.stored - tree.prefix_rows
    left = tree.prefix_rows
    while left:
        rows = min(left, room or step_rows)
        first, left, room = first + rows, left - rows, 0
        yield Tree(stored=first, prefix_rows=rows)
    left = tree.items
    while left:
        count = min(left, room // tree.item_tokens) or min(left, step_rows // tree.item_tokens)
        left, room = left - count, 0
        yield replace(tree, items=count)


def _joined(trees: Sequence[Tree]) -> Step:
    """Items beside the rows of their prefix are one tree with them."""
    joined: list[Tree] = []
    for tree in trees:
        before = joined[-1] if joined else None
        if before and tree.items and not before.items and before.stored == tree.stored:
            joined[-1] = replace(tree, prefix_rows=before.prefix_rows)
        else:
            joined.append(tree)
    return tuple(joined)


def prefill_layout(step: Step) -> AttentionLayout:
    rows, nodes, is_item = list[int](), list[int](), list[bool]()
    for node, tree in enumerate(step):
        if tree.prefix_rows:
            rows.append(tree.prefix_rows)
            nodes.append(node)
            is_item.append(False)
        rows += [tree.item_tokens] * tree.items
        nodes += [node] * tree.items
        is_item += [True] * tree.items
    return _layout(
        parents=[-1] * len(step),
        tokens=[tree.stored for tree in step],
        rows=rows,
        nodes=nodes,
        is_item=np.array(is_item, np.bool_),
    )


def decode_layout(workload: Workload, rows: int) -> AttentionLayout:
    """Samples of several prompts in the middle of their generation."""
    prompts = -(-rows // workload.samples)
    parents = [-1] * prompts + [row // workload.samples for row in range(rows)]
    whole = max(PAGE_SIZE, workload.prefix_tokens // PAGE_SIZE * PAGE_SIZE)
    own = max(1, workload.prefix_tokens - whole + workload.new_tokens // 2)
    return _layout(
        parents=parents,
        tokens=[whole] * prompts + [own] * rows,
        rows=[1] * rows,
        nodes=list(range(prompts, prompts + rows)),
        is_item=np.zeros(rows, np.bool_),
    )


def _layout(
    *,
    parents: list[int],
    tokens: list[int],
    rows: list[int],
    nodes: list[int],
    is_item: np.ndarray,
) -> AttentionLayout:
    """Each node has pages of its own."""
    page_indptr = indptr(int32([-(-count // PAGE_SIZE) for count in tokens]))
    return AttentionLayout(
        page_size=PAGE_SIZE,
        node_parent=int32(parents),
        node_page_indptr=page_indptr,
        node_pages=np.arange(page_indptr[-1], dtype=np.int32),
        node_tokens=int32(tokens),
        segment_indptr=indptr(int32(rows)),
        segment_node=int32(nodes),
        segment_is_item=is_item,
    )
