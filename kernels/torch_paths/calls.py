"""Calls of the attention kernel: which rows read which keys, batched where shapes are alike."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stemserve.kernels.layout import Int32, int32
from stemserve.kernels.strategy import TORCH, Part, Work

# A call costs about 30 us of Python and dispatch, as much as copying 100 tokens of 3 x 64 heads
# takes: short runs are copied side by side and read by one padded call.
MAX_BATCHED_TOKENS = 256
MAX_BATCHED_ROWS = 64
# Scattered pages are copied in any case, so longer ones may be batched too.
MAX_BATCHED_SCATTERED_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTokens:
    """Tokens `start` .. `start + tokens` of a list of pages, shared by all sequences of a call."""

    pages: Int32  # [pages]
    start: int
    tokens: int
    page_size: int
    copied: bool = False  # read a contiguous copy even where the pages are consecutive

    @property
    def first_slot(self) -> int | None:
        """Where the tokens lie as one run of the pool, or None."""
        first, last = self.start // self.page_size, (self.start + self.tokens - 1) // self.page_size
        used = self.pages[first : last + 1]
        if self.copied or (len(used) > 1 and (np.diff(used) != 1).any()):
            return None
        return int(used[0]) * self.page_size + self.start % self.page_size

    def slots(self) -> Int32:
        token = np.arange(self.start, self.start + self.tokens, dtype=np.int32)
        return self.pages[token // self.page_size] * self.page_size + token % self.page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedTokens:
    """A list of pool slots for each sequence; past `counts` a slot is repeated, and masked."""

    slots: Int32  # [sequences, tokens]
    counts: Int32  # [sequences]

    @property
    def tokens(self) -> int:
        return int(self.slots.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRows:
    """K/V rows of this step, in the layout's numbering; sequence i has those of its segment."""

    first: Int32  # [sequences]
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A batch of sequences: `rows` query rows each, padded to the longest, over some tokens."""

    row_start: Int32  # [sequences] first row, in the schedule's order
    target_start: Int32 | None = None  # [sequences] where the first row's result goes; None: there
    rows: Int32  # [sequences]
    tokens: PageTokens | PaddedTokens | OwnRows
    causal: bool = False  # row i of a sequence sees tokens 0..i
    visible: Int32 | None = None  # [rows] of a single sequence: tokens that each row sees

    @property
    def sequences(self) -> int:
        return len(self.rows)

    @property
    def padded_rows(self) -> int:
        return int(self.rows.max())

    @property
    def targets(self) -> Int32:
        return self.row_start if self.target_start is None else self.target_start

    @property
    def is_dense(self) -> bool:
        """The rows of all sequences are one range without padding, and so are their results."""
        steps = self.padded_rows * np.arange(self.sequences)
        return bool(
            (self.rows == self.padded_rows).all()
            and np.array_equal(self.row_start, self.row_start[0] + steps)
            and np.array_equal(self.targets, self.targets[0] + steps)
        )

    @property
    def launches(self) -> int:
        """The call, and the copy of the keys and values that it reads if there is one."""
        match self.tokens:
            case PageTokens():
                return 1 if self.tokens.first_slot is not None else 2
            case PaddedTokens():
                return 2
            case OwnRows():
                return 1


def call_work(calls: Iterable[Call]) -> Work:
    """Padding included: it is read and computed too."""
    listed = list(calls)
    kinds = ((kind, [call for call in listed if call.causal is kind]) for kind in (False, True))
    return Work(parts=tuple(_part(alike, causal=kind) for kind, alike in kinds if alike))


def _part(calls: Sequence[Call], *, causal: bool) -> Part:
    sequences = [call.sequences for call in calls]
    return Part(
        engine=TORCH,
        rows=np.repeat(int32([call.padded_rows for call in calls]), sequences),
        kv_tokens=np.repeat(int32([call.tokens.tokens for call in calls]), sequences),
        causal=causal,
        launches=sum(call.launches for call in calls),
    )


def dense_call(row_start: int, rows: int, tokens: PageTokens) -> Call:
    return Call(row_start=int32([row_start]), rows=int32([rows]), tokens=tokens)


def size_classes(sizes: Int32) -> Int32:  # as `sizes`
    """Sizes of one class differ by less than a factor of sqrt(2), so padding wastes less."""
    return np.round(2 * np.log2(np.maximum(sizes, 1))).astype(np.int32)


def own_row_calls(
    row_start: Int32,  # [items] rows of the step that ask
    rows: Int32,  # [items]
    first: Int32,  # [items] rows of the step from which on they read
) -> list[Call]:
    """Causal attention of items over their own rows, a call for each class of lengths."""
    classes = np.where(rows > 0, size_classes(rows), -1)
    calls: list[Call] = []
    for size in np.unique(classes[classes >= 0]):
        members = classes == size
        tokens = OwnRows(first=first[members], tokens=int(rows[members].max()))
        calls.append(
            Call(row_start=row_start[members], rows=rows[members], tokens=tokens, causal=True)
        )
    return calls


def shared_page_calls(
    row_start: Int32,  # [sequences]
    rows: Int32,  # [sequences]
    tokens: PageTokens,
) -> list[Call]:
    """Sequences that each read the same tokens, a call for each class of row counts."""
    classes = np.where(rows > 0, size_classes(rows), -1)
    members = (classes == size for size in np.unique(classes[classes >= 0]))
    return [Call(row_start=row_start[m], rows=rows[m], tokens=tokens) for m in members]


def batch_page_calls(calls: Sequence[Call]) -> list[Call]:
    """Join the short ones of some calls over pages to padded calls."""
    joined: list[Call] = []
    buckets: defaultdict[tuple[int, int], list[Call]] = defaultdict(list)
    for call in calls:
        if _is_short(call):
            sizes = size_classes(int32([call.padded_rows, call.tokens.tokens]))
            buckets[int(sizes[0]), int(sizes[1])].append(call)
        else:
            joined.append(call)
    for bucket in buckets.values():
        joined.append(bucket[0] if len(bucket) == 1 else _join(bucket))
    return joined


def _is_short(call: Call) -> bool:
    if not isinstance(call.tokens, PageTokens) or call.causal or call.visible is not None:
        return False
    scattered = call.tokens.first_slot is None
    limit = MAX_BATCHED_SCATTERED_TOKENS if scattered else MAX_BATCHED_TOKENS
    copied = call.tokens.tokens * call.sequences
    return copied <= limit and call.padded_rows <= MAX_BATCHED_ROWS


def _join(calls: Sequence[Call]) -> Call:
    lists: list[Int32] = []
    for call in calls:
        if isinstance(call.tokens, PageTokens):
            lists += [call.tokens.slots()] * call.sequences
    counts = int32([len(slots) for slots in lists])
    slots = np.empty((len(lists), int(counts.max())), np.int32)
    for sequence, used in enumerate(lists):
        slots[sequence, : len(used)] = used
        slots[sequence, len(used) :] = used[-1]
    return Call(
        row_start=np.concatenate([call.row_start for call in calls]),
        target_start=np.concatenate([call.targets for call in calls]),
        rows=np.concatenate([call.rows for call in calls]),
        tokens=PaddedTokens(slots=slots, counts=counts),
    )
