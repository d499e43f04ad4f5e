"""The pages of the KV pool that nobody holds."""

from collections.abc import Sequence

import numpy as np

from stemserve.service.request import Int32

TAKEN, FREE = b"\0", b"\1"


class PageAllocator:
    """Hands out consecutive pages where it can: a run of them is one view of the pool.

    The state is searched as bytes: a search through numpy lets go of the interpreter's lock, and
    then waits for the thread of the calls to give it back.
    """

    def __init__(self, num_pages: int) -> None:
        self._state = bytearray(FREE * num_pages)
        self._is_free = np.frombuffer(self._state, np.bool_)  # the same bytes
        self._num_free = num_pages
        self._lowest = 0  # no page below it is free

    @property
    def num_pages(self) -> int:
        return len(self._state)

    @property
    def num_free(self) -> int:
        return self._num_free

    def is_free(self, page: int) -> bool:
        return bool(self._state[page])

    def allocate(self, count: int, *, after: int = -1) -> Int32:
        """Take `count` pages; those behind page `after`, if they are free."""
        if count == 0:
            return np.empty(0, np.int32)
        if count > self._num_free:
            raise RuntimeError(f"{count} pages asked of {self._num_free} free ones")
        self._num_free -= count
        first = self._run(count, after)
        if first < 0:
            pages = self._is_free.nonzero()[0][:count].astype(np.int32)
            self._is_free[pages] = False
            return pages
        self._state[first : first + count] = TAKEN * count
        if count == 1:
            return np.array([first], np.int32)
        return np.arange(first, first + count, dtype=np.int32)

    def free(self, pages: Sequence[int] | Int32) -> None:
        if len(pages) == 0:
            return
        at = np.asarray(pages, np.int32)
        if self._is_free[at].any():
            raise RuntimeError(f"pages {at[self._is_free[at]].tolist()} are freed twice")
        self._is_free[at] = True
        self._num_free += len(at)
        self._lowest = min(self._lowest, int(at.min()))

    def _run(self, count: int, after: int) -> int:
        """The first of so many free pages in a row: behind `after`, or the lowest; -1: none."""
        end = after + 1 + count
        behind = after >= 0 and end <= len(self._state)
        if behind and self._state.find(TAKEN, after + 1, end) < 0:
            return after + 1
        self._lowest = self._state.find(FREE, self._lowest)
        return self._lowest if count == 1 else self._state.find(FREE * count, self._lowest)
