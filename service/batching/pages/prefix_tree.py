"""The cache's index: token ids -> pages, one tree a salt, one node a page.

Behind the last full page of a shared trunk the tree of the group goes on in a tree for each tenant.
"""

import heapq
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from stemserve.service.batching.pages.page_allocator import PageAllocator
from stemserve.service.batching.pages.page_node import (
    TOKEN_BYTES,
    PageNode,
    child,
    closest,
    link,
    unlink,
)
from stemserve.service.request import Realm


class Match(NamedTuple):
    nodes: list[PageNode]  # full pages
    tail: PageNode | None  # page that shares the most leading tokens with what follows
    tail_tokens: int  # how many it shares


class PrefixTree:
    """Whoever holds a node holds its ancestors: under an unreferenced one, nothing is in use."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, PageNode] = {}
        self._evictable: list[tuple[int, int, PageNode]] = []  # heap; entries go stale
        self._serial = count()
        self._lost_pages: list[int] = []  # that no node has any more; freed together
        self._tick = 0
        self.num_pages = 0
        self.num_unreferenced = 0

    def match(self, key: bytes, realm: Realm) -> Match:
        """The longest part of the sequence that is in the tree, computed or about to be."""
        nodes: list[PageNode] = []
        size, trunk_pages = self._page_bytes, realm.trunk.tokens // self._page_size
        node = self.parent(nodes, realm)
        for start in range(0, len(key), size):
            rest = key[start : start + size]
            known = child(node, rest)
            if known is None or len(rest) < size:
                return Match(nodes, *closest(node, rest))
            nodes.append(known)
            node = known if len(nodes) != trunk_pages else self.parent(nodes, realm)
        return Match(nodes, None, 0)

    def parent(self, nodes: Sequence[PageNode], realm: Realm) -> PageNode:
        """What the next page of a sequence goes on behind, where it belongs."""
        trunk_pages = realm.trunk.tokens // self._page_size
        last = nodes[-1] if nodes else None
        if len(nodes) == trunk_pages:
            return self._root(realm.salt, last)
        return self._root(realm.trunk.salt, None) if last is None else last

    def insert(self, parent: PageNode, key: bytes, page: int) -> PageNode:
        """Add a page, held once by the caller."""
        if parent.is_root:
            self._add_root(parent)
        node = PageNode(page=page, key=key, parent=parent, refs=1)
        link(parent, node)
        self.num_pages += 1
        return node

    def insert_run(self, parent: PageNode, key: bytes, pages: Sequence[int]) -> list[PageNode]:
        """Add pages one behind the other, each held once by the caller; `key` is that of all."""
        size = self._page_bytes
        node = self.insert(parent, key[:size], pages[0])
        added = [node]
        for page, start in zip(pages[1:], range(size, len(key), size), strict=True):
            behind = PageNode(page, key[start : start + size], node, 1)
            node.children = [behind]
            added.append(behind)
            node = behind
        self.num_pages += len(pages) - 1
        return added

    def extend_key(self, node: PageNode, key: bytes) -> None:
        """The leaf's page has been filled further: `key` begins with its tokens."""
        parent = unlink(node)
        node.key = key
        link(parent, node)

    def retain(self, nodes: Sequence[PageNode]) -> None:
        for node in nodes:
            if node.refs == 0:
                self.num_unreferenced -= 1
            node.refs += 1

    def release(self, nodes: Sequence[PageNode]) -> None:
        """Let go of a chain, its last page first. What has content stays cached."""
        self._tick += 1
        tick = self._tick
        for node in reversed(nodes):
            node.refs -= 1
            if node.refs > 0:
                continue
            node.used = tick
            if node.attached:
                self.num_unreferenced += 1
                if node.is_leaf:
                    self._settle(node)
            else:
                self._lost_pages.append(node.page)
        self._free_lost()

    def evict(self, pages: int) -> None:
        """Free that many pages, least recently used leaves first."""
        while pages > 0:
            used, _, node = heapq.heappop(self._evictable)
            if node.attached and node.refs == 0 and node.is_leaf and node.used == used:
                pages -= self._remove_run(node, pages)
        self._free_lost()

    def discard(self, node: PageNode) -> None:
        """Take a page and all behind it out of the tree; pages in use are freed when let go."""
        if not node.attached:
            return
        parent = unlink(node)
        below = [node]
        while below:
            lost = below.pop()
            below += lost.below()
            lost.attached = False
            if lost.is_root:
                continue
            self.num_pages -= 1
            if lost.refs == 0:
                self.num_unreferenced -= 1
                self._lost_pages.append(lost.page)
        self._settle(parent)
        self._free_lost()

    def nodes(self) -> list[PageNode]:
        """All pages of the tree."""
        found: list[PageNode] = []
        below = list(self._roots.values())
        while below:
            node = below.pop()
            below += node.below()
            if not node.is_root:
                found.append(node)
        return found

    def _root(self, salt: bytes, behind: PageNode | None) -> PageNode:
        """It is in the tree while there are pages under it."""
        known = (self._roots if behind is None else behind.roots or {}).get(salt)
        if known is not None:
            return known
        attached = behind is None or behind.attached
        return PageNode(page=-1, key=salt, parent=behind, attached=attached)

    def _add_root(self, root: PageNode) -> None:
        behind = root.parent
        if behind is None:
            self._roots[root.key] = root
        elif behind.roots is None:
            behind.roots = {root.key: root}
        else:
            behind.roots[root.key] = root

    def _settle(self, node: PageNode) -> None:
        """A node may have become an unreferenced leaf."""
        if not node.is_leaf:
            return
        if node.is_root:
            behind = node.parent
            roots = self._roots if behind is None else behind.roots or {}
            del roots[node.key]
            if behind is not None:
                self._settle(behind)
        elif node.refs == 0 and node.planned == 0:
            self._remove(node)
        elif node.refs == 0:
            heapq.heappush(self._evictable, (node.used, next(self._serial), node))
            if len(self._evictable) > 2 * self._allocator.num_pages + 64:
                self._rebuild_heap()

    def _remove(self, node: PageNode) -> None:
        parent = unlink(node)
        node.attached = False
        self.num_pages -= 1
        self.num_unreferenced -= 1
        self._lost_pages.append(node.page)
        self._settle(parent)

    def _remove_run(self, leaf: PageNode, most: int) -> int:
        """Take out a leaf, and the pages above it that were let go of with it: they are the least
        recently used ones, one after the other. Returns how many."""
        lost, top = [leaf.page], leaf
        leaf.attached = False
        while len(lost) < most:
            above = top.parent
            if above is None or above.is_root or above.refs or above.used != leaf.used:
                break
            if above.roots or above.children is None or len(above.children) > 1:
                break
            above.attached, above.children = False, None
            lost.append(above.page)
            top = above
        self.num_pages -= len(lost)
        self.num_unreferenced -= len(lost)
        self._lost_pages += lost
        self._settle(unlink(top))
        return len(lost)

    def _free_lost(self) -> None:
        pages, self._lost_pages = self._lost_pages, []
        self._allocator.free(pages)

    def _rebuild_heap(self) -> None:
        leaves = [n for n in self.nodes() if n.refs == 0 and n.is_leaf]
        self._evictable = [(node.used, next(self._serial), node) for node in leaves]
        heapq.heapify(self._evictable)
