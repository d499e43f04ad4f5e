"""Sequences of tokens and the pages that hold their KV."""

import numpy as np

from stemserve.service.batching.pages.page_node import PageNode
from stemserve.service.request import Int32


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def table_slots(table: Int32, start: int, stop: int, page_size: int) -> Int32:
    """Where the KV of positions start .. stop - 1 is kept: page * page_size + offset."""
    first = start // page_size
    starts: Int32 = table[first : pages_for(stop, page_size)] * page_size
    inside: Int32 = np.arange(page_size, dtype=np.int32)
    slots: Int32 = (starts[:, None] + inside).ravel()
    return slots[start - first * page_size : stop - first * page_size]


class Chain:
    """A context or prompt whose pages are all in the prefix tree, held until they are released."""

    def __init__(self, tokens: Int32, nodes: list[PageNode], page_size: int) -> None:
        self.tokens = tokens
        self.nodes = nodes
        self.page_size = page_size
        self.table: Int32 = np.array([node.page for node in nodes], np.int32)
        self._complete = 0  # leading pages that issued steps compute

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def full_pages(self) -> int:
        return self.length // self.page_size

    @property
    def tail(self) -> PageNode | None:
        """The last page, where it is not full."""
        return self.nodes[self.full_pages] if self.full_pages < len(self.nodes) else None

    @property
    def tail_tokens(self) -> int:
        return self.length % self.page_size

    def planned_tokens(self) -> int:
        """Leading tokens that issued steps compute, whoever asked for them."""
        length, size = len(self.tokens), self.page_size
        if self._complete == len(self.nodes):
            return length
        for index in range(self._complete, len(self.nodes)):
            planned = self.nodes[index].planned
            if planned < size and planned < length - index * size:
                self._complete = index
                return index * size + planned
        self._complete = len(self.nodes)
        return length

    def recheck(self) -> None:
        """Pages of the chain may have lost what a failed step should have computed."""
        self._complete = 0

    def slots(self, start: int, stop: int) -> Int32:
        return table_slots(self.table, start, stop, self.page_size)


class Branch:
    """A sequence that goes on behind a chain's full pages in pages of its own.

    Its first own page begins with the chain's partial tail: a copy, or the chain's page itself
    where the branch is the one that goes on in it.
    """

    def __init__(self, chain: Chain | None, *, capacity: int, page_size: int) -> None:
        self.page_size = page_size
        self.chain_pages = chain.full_pages if chain is not None else 0
        self.tail = chain.tail if chain is not None else None
        self.tail_tokens = chain.tail_tokens if chain is not None else 0
        self.claimed: PageNode | None = None  # the chain's own tail page, written further
        self.num_pages = self.chain_pages
        self.own_key = b""  # pages up to the first of its own, as bytes; b"": it has not begun
        self.table: Int32 = np.full(pages_for(capacity, page_size), -1, np.int32)
        if chain is not None:
            self.table[: self.chain_pages] = chain.table[: self.chain_pages]

    @property
    def has_started(self) -> bool:
        return self.num_pages > self.chain_pages

    @property
    def own_pages(self) -> Int32:
        """Pages that nobody else holds."""
        first = self.chain_pages + (self.claimed is not None)
        return self.table[first : self.num_pages]

    @property
    def last_page(self) -> int:
        return int(self.table[self.num_pages - 1]) if self.num_pages else -1

    def missing_pages(self, tokens: int) -> int:
        return max(0, pages_for(tokens, self.page_size) - self.num_pages)

    def claim_tail(self, node: PageNode) -> None:
        node.has_writer = True
        self.claimed = node
        self.add_pages(np.array([node.page], np.int32))

    def add_pages(self, pages: Int32) -> None:
        self.table[self.num_pages : self.num_pages + len(pages)] = pages
        self.num_pages += len(pages)
        if not self.own_key and len(pages):
            self.own_key = self.table[: self.chain_pages + 1].tobytes()

    def slots(self, start: int, stop: int) -> Int32:
        return table_slots(self.table, start, stop, self.page_size)
