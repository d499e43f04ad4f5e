"""The pages in which the beams of a search go on behind its prompt.

All beams have the same length. Beams that come from one share its full pages; one of them goes on
in its partly filled page, the others begin theirs with a copy of it. A page that no beam reads any
more is free at once.
"""

from typing import NamedTuple

import numpy as np

from stemserve.service.batching.kv_cache import KvCache
from stemserve.service.batching.sequence import Chain, pages_for
from stemserve.service.batching.step_builder import StepBuilder
from stemserve.service.request import Int32

NO_PAGE = -1


class BeamTable(NamedTuple):
    """Pages of one beam, the last of them its own."""

    table: Int32
    own_key: bytes


class BeamPages:
    def __init__(self, cache: KvCache, chain: Chain, *, capacity: int) -> None:
        """`capacity`: tokens of the longest beam that are stored."""
        self._cache = cache
        self._chain = chain
        self._first_own = chain.full_pages
        width = max(len(chain.nodes), pages_for(capacity, cache.page_size))
        self._tables: Int32 = np.full((1, width), NO_PAGE, np.int32)  # [beams, pages]
        self._tables[0, : chain.full_pages] = chain.table[: chain.full_pages]
        self._tails: Int32 = np.full(1, NO_PAGE, np.int32)  # [beams] a page to begin the next with

    @property
    def num_pages(self) -> int:
        """That the beams hold, the prompt's not counted."""
        return len(self._own(self._tables))

    def fork(self, parents: Int32, stored: int) -> None:
        """Beam i goes on from beam parents[i]; each has `stored` tokens in pages."""
        self._tails = np.full(len(parents), NO_PAGE, np.int32)
        if np.array_equal(parents, np.arange(len(self._tables))):
            return
        at, offset = divmod(stored, self._cache.page_size)
        before = self._own(self._tables)
        tables = self._tables[parents]
        if offset and stored > self._chain.length:
            _, first = np.unique(parents, return_index=True)
            moves = np.zeros(len(parents), np.bool_)
            moves[first] = True
            self._tails[~moves] = tables[~moves, at]
            tables[~moves, at] = NO_PAGE
        self._tables = tables
        self._cache.allocator.free(np.setdiff1d(before, self._own(tables)))

    def table(self, beam: int, start: int, step: StepBuilder) -> BeamTable | None:
        """Pages for the token at `start`, the first that the beam does not store. None: there is no
        page now."""
        at, offset = divmod(start, self._cache.page_size)
        table = self._tables[beam]
        if table[at] == NO_PAGE:
            before = int(table[at - 1]) if at else NO_PAGE
            found = None if step.pages_blocked else self._cache.allocate(1, after=before)
            if found is None:
                return None
            page = int(found[0])
            table[at] = page
            if self._tails[beam] != NO_PAGE:
                step.copy_page(int(self._tails[beam]), page, offset)
            elif offset and self._chain.tail is not None:
                step.add_copy(self._chain.tail, page, offset)
        return BeamTable(table, table[: at + 1].tobytes())

    def drop(self) -> None:
        self._cache.allocator.free(self._own(self._tables))
        self._tables = self._tables[:0]

    def _own(self, tables: Int32) -> Int32:
        pages: Int32 = np.unique(tables[:, self._first_own :])
        held: Int32 = pages[pages != NO_PAGE]
        return held
