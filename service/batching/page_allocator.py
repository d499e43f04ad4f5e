"""The pages of the KV pool that nobody holds."""

from collections.abc import Sequence

import numpy as np

from stemserve.service.request import Int32

NEAR = 4  # times the pages asked for, from the lowest free one: there a run is looked for first


class PageAllocator:
    """Hands out consecutive pages where it can: a run of them is one view of the pool."""

    def __init__(self, num_pages: int) -> None:
        self._is_free = np.ones(num_pages, np.bool_)
        self._num_free = num_pages
        self._lowest = 0  # no page below it is free

    @property
    def num_pages(self) -> int:
        return len(self._is_free)

    @property
    def num_free(self) -> int:
        return self._num_free

    def is_free(self, page: int) -> bool:
        return bool(self._is_free[page])

    def allocate(self, count: int, *, after: int = -1) -> Int32:
        """Take `count` pages; those behind page `after`, if they are free."""
        if count == 0:
            return np.empty(0, np.int32)
        if count > self._num_free:
            raise RuntimeError(f"{count} pages asked of {self._num_free} free ones")
        if count == 1:
            return np.array([self._take_one(after)], np.int32)
        pages = self._following(count, after)
        if pages is None:
            pages = self._lowest_run(count)
        self._is_free[pages] = False
        self._num_free -= count
        return pages

    def free(self, pages: Sequence[int] | Int32) -> None:
        if len(pages) == 0:
            return
        at = np.asarray(pages, np.int32)
        if self._is_free[at].any():
            raise RuntimeError(f"pages {at[self._is_free[at]].tolist()} are freed twice")
        self._is_free[at] = True
        self._num_free += len(at)
        self._lowest = min(self._lowest, int(at.min()))

    def _take_one(self, after: int) -> int:
        page = after + 1
        if after < 0 or page >= len(self._is_free) or not self._is_free[page]:
            self._lowest += int(self._is_free[self._lowest :].argmax())
            page = self._lowest
        self._is_free[page] = False
        self._num_free -= 1
        return page

    def _following(self, count: int, after: int) -> Int32 | None:
        run = self._is_free[after + 1 : after + 1 + count]
        if after < 0 or len(run) < count or not run.all():
            return None
        return np.arange(after + 1, after + 1 + count, dtype=np.int32)

    def _lowest_run(self, count: int) -> Int32:
        self._lowest += int(self._is_free[self._lowest :].argmax())
        run = self._run_before(self._lowest + NEAR * count, count)
        if run is None:
            run = self._run_before(self.num_pages, count)
        return self._is_free.nonzero()[0][:count].astype(np.int32) if run is None else run

    def _run_before(self, end: int, count: int) -> Int32 | None:
        """The lowest run of free pages below `end`."""
        free = self._is_free[self._lowest : end].nonzero()[0]
        is_run = free[count - 1 :] - free[: max(0, len(free) - count + 1)] == count - 1
        first = int(is_run.argmax()) if len(is_run) else 0
        if not len(is_run) or not is_run[first]:
            return None
        start = int(free[first]) + self._lowest
        return np.arange(start, start + count, dtype=np.int32)
