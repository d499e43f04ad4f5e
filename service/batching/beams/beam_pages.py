"""The pages in which the beams of a search go on behind its prompt.

All beams have the same length. Beams that come from one share its full pages; one of them goes on
in its partly filled page, the others begin theirs with a copy of it. A page that no beam reads any
more is free at once.
"""

import numpy as np
from numpy.typing import NDArray

from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.sequence import Chain, pages_for
from stemserve.service.batching.steps.beam_rows import BeamRows
from stemserve.service.batching.steps.step_builder import StepBuilder
from stemserve.service.request import Int32

NO_PAGE = -1


class BeamPages:
    def __init__(self, cache: KvCache, chain: Chain, *, capacity: int) -> None:
        """`capacity`: tokens of the longest beam that are stored."""
        self._cache = cache
        self._chain = chain
        self._prompt_pages = chain.table[: chain.full_pages]
        most = pages_for(capacity, cache.page_size) - chain.full_pages
        self._own: Int32 = np.full((1, max(1, most)), NO_PAGE, np.int32)  # [beams, pages]
        self._tails: Int32 = np.full(1, NO_PAGE, np.int32)  # [beams] a page to begin the next with
        self._rank: Int32 = np.zeros(1, np.int32)  # [beams] among the leaves, depth first
        # Scratch, and one more, for NO_PAGE.
        self._is_lost = np.zeros(cache.allocator.num_pages + 1, np.bool_)

    @property
    def num_pages(self) -> int:
        """That the beams hold, the prompt's not counted."""
        return len(self._held())

    def fork(self, parents: Int32, stored: int) -> None:
        """Beam i goes on from beam parents[i]; each has `stored` tokens in pages, and none lacks
        one."""
        before, beams = self._own, len(parents)
        self._tails = np.full(beams, NO_PAGE, np.int32)
        if beams == len(before) and (parents == np.arange(beams)).all():
            return
        own = before[parents]
        at, offset = self._place(stored)
        rank = self._rank[parents]
        order = rank.argsort(kind="stable")  # children of one beam are neighbours
        self._rank = np.empty(beams, np.int32)
        self._rank[order] = np.arange(beams)
        filled = at
        if offset and stored > self._chain.length:
            filled = at + 1
            copies = order[1:][rank[order][1:] == rank[order][:-1]]
            self._tails[copies] = own[copies, at]
            own[copies, at] = NO_PAGE
        self._own = own
        self._free_lost(before[:, :filled], own[:, :filled], parents)

    def prepare(self, first: int, end: int, start: int, step: StepBuilder) -> int:
        """Pages for the token at `start`, the first that beams first .. end - 1 do not store.
        Returns behind the last of them that has one: then there is no page for the next now."""
        at, offset = self._place(start)
        missing = np.flatnonzero(self._own[first:end, at] == NO_PAGE) + first
        if not len(missing):
            return end
        room = 0 if step.pages_blocked else self._cache.available_pages
        given: NDArray[np.intp] = missing[:room]
        pages = self._cache.allocate(len(given), after=self._page_before(at))
        if pages is not None:
            self._own[given, at] = pages
            self._begin(given, pages, offset, step)
        return end if room >= len(missing) else int(missing[room])

    def rows(self, first: int, end: int, start: int) -> BeamRows:
        """Of beams that have a page for the token at `start`."""
        at, _ = self._place(start)
        return BeamRows(
            prompt_pages=self._prompt_pages,
            own=self._own[first:end, : at + 1],
            rank=self._rank[first:end],
            tokens=start + 1,
        )

    def drop(self) -> None:
        self._cache.allocator.free(self._held())
        self._own = self._own[:0]

    def _place(self, token: int) -> tuple[int, int]:
        """The page of a token, behind the prompt's full ones, and its place there."""
        page, offset = divmod(token, self._cache.page_size)
        return page - len(self._prompt_pages), offset

    def _page_before(self, at: int) -> int:
        """One that is before some beam's page."""
        if at:
            return int(self._own[0, at - 1])
        return int(self._prompt_pages[-1]) if len(self._prompt_pages) else NO_PAGE

    def _begin(self, beams: NDArray[np.intp], pages: Int32, offset: int, step: StepBuilder) -> None:
        """With a copy of the first `offset` tokens of the page that each beam's parent had."""
        if not offset:
            return
        tails = self._tails[beams]
        if (tails != NO_PAGE).all():
            step.copy_pages(tails.tolist(), pages.tolist(), offset)
        elif self._chain.tail is not None:  # behind the prompt all beams begin alike
            for page in pages.tolist():
                step.add_copy(self._chain.tail, page, offset)

    def _free_lost(self, before: Int32, after: Int32, parents: Int32) -> None:
        """Only beams that nobody goes on from had pages that nobody has any more."""
        is_parent = np.zeros(len(before), np.bool_)
        is_parent[parents] = True
        had, is_lost = before[~is_parent].ravel(), self._is_lost
        is_lost[had] = True
        is_lost[after.ravel()] = False
        lost = set[int](had[is_lost[had]].tolist())
        is_lost[had] = False
        self._cache.allocator.free(list(lost))

    def _held(self) -> Int32:
        pages: Int32 = np.unique(self._own)
        held: Int32 = pages[pages != NO_PAGE]
        return held
