"""Pages for sequences: shared through the prefix tree, taken from free pages, or evicted."""

from collections.abc import Mapping
from typing import Protocol

from stemserve.service.batching.pages.page_allocator import PageAllocator
from stemserve.service.batching.pages.page_node import TOKEN_BYTES, PageNode, child, token_key
from stemserve.service.batching.pages.prefix_tree import PrefixTree
from stemserve.service.batching.pages.sequence import Branch, Chain, pages_for
from stemserve.service.request import Int32, Realm


class PageLedger(Protocol):
    """The step in which pages are taken."""

    def planned_before(self, node: PageNode) -> int: ...
    def add_copy(self, source: PageNode, page: int, tokens: int) -> None: ...
    def copy_tail(self, branch: Branch) -> None: ...
    def mark(self, node: PageNode, planned: int) -> None: ...
    def hold(self, node: PageNode) -> None: ...


class KvCache:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.allocator = PageAllocator(num_pages)
        self.tree = PrefixTree(self.allocator, page_size)
        self.evicted_pages = 0  # to make room
        self.cleared_pages = 0  # because somebody asked

    @property
    def available_pages(self) -> int:
        """Free, or cached and in nobody's use."""
        return self.allocator.num_free + self.tree.num_unreferenced

    def allocate(self, count: int, *, after: int = -1) -> Int32 | None:
        """Pages of the caller's own; evicts what was not used for longest. None: no room now."""
        if count > self.available_pages:
            return None
        if count > self.allocator.num_free:
            missing = count - self.allocator.num_free
            self.tree.evict(missing)
            self.evicted_pages += missing
        return self.allocator.allocate(count, after=after)

    def clear(self) -> int:
        """Free all that is cached and in nobody's use; returns how many pages."""
        freed = self.tree.num_unreferenced
        self.tree.evict(freed)
        self.cleared_pages += freed
        return freed

    def missing_pages(self, tokens: Int32, realm: Realm) -> int:
        """How much fewer pages are available once a prompt is held."""
        nodes, tail, _ = self.tree.match(token_key(tokens), realm)
        if tail is not None and len(nodes) * self.page_size + tail.size == len(tokens):
            nodes.append(tail)
        held = sum(node.refs > 0 for node in nodes)
        return pages_for(len(tokens), self.page_size) - held

    def acquire(
        self, tokens: Int32, realm: Realm, step: PageLedger, *, own_tail: bool
    ) -> Chain | None:
        """Hold pages for a context; None: no room now.

        Pages that are missing enter the tree at once, to be computed by whoever is planned first.
        A last page that holds more tokens than the context needs is read as it is; with `own_tail`
        the context gets one that ends where it ends, to be written further.
        """
        key = token_key(tokens)
        nodes, tail, shared = self.tree.match(key, realm)
        rest = len(tokens) - len(nodes) * self.page_size
        if tail is not None and shared == rest and (tail.size == rest or not own_tail):
            nodes.append(tail)
            tail, rest = None, 0
        self.tree.retain(nodes)
        source = tail if tail is not None and step.planned_before(tail) else None
        taken = self._allocate_beside(source, pages_for(rest, self.page_size))
        if taken is None:
            self.tree.release(nodes)
            return None
        pages, source = taken
        first = len(nodes)
        self._insert(nodes, key, realm, pages)
        if source is not None:
            copied = min(shared, step.planned_before(source))
            step.hold(source)
            step.add_copy(source, nodes[first].page, copied)
            step.mark(nodes[first], copied)
        return Chain(tokens, nodes, self.page_size)

    def can_extend(self, branch: Branch, step: PageLedger) -> bool:
        """False: its first page is a copy that has to wait for the next step."""
        tail = None if branch.has_started else branch.tail
        if tail is None or _claims(branch, tail):
            return True
        return step.planned_before(tail) >= branch.tail_tokens

    def extend(self, branch: Branch, tokens: int, step: PageLedger) -> bool:
        """Give a generation's branch pages for that many tokens. False: no room now."""
        tail = None if branch.has_started else branch.tail
        claims = tail is not None and _claims(branch, tail)
        pages = self.allocate(branch.missing_pages(tokens) - claims, after=branch.last_page)
        if pages is None:
            return False
        if tail is not None and claims:
            branch.claim_tail(tail)
        branch.add_pages(pages)
        if tail is not None and not claims:
            self.tree.retain([tail])
            step.hold(tail)
            step.copy_tail(branch)
        return True

    def drop(self, branch: Branch) -> None:
        """Free what only the branch holds."""
        if branch.claimed is not None:
            branch.claimed.has_writer = False
        self.allocator.free(branch.own_pages)
        branch.num_pages, branch.claimed = branch.chain_pages, None

    def adopt(self, branch: Branch, chain: Chain, tokens: Int32, realm: Realm) -> None:
        """Leave the pages of a finished generation, computed for `tokens`, in the tree."""
        nodes = chain.nodes[: branch.chain_pages]
        parent: PageNode | None = self.tree.parent(nodes, realm)
        added: list[PageNode] = []
        spare: list[int] = []
        for index in range(branch.chain_pages, branch.num_pages):
            key = token_key(tokens[index * self.page_size : (index + 1) * self.page_size])
            page = int(branch.table[index])
            known = child(parent, key) if parent is not None and key else None
            if parent is None or not parent.attached or not key:
                parent = None
            elif branch.claimed is not None and index == branch.chain_pages:
                parent = self._adopt_claimed(branch.claimed, key, known)
                continue
            elif known is None:
                parent = self.tree.insert(parent, key, page)
                parent.planned = parent.size
                added.append(parent)
                continue
            else:
                parent = known if known.planned == known.size else None
            if branch.claimed is None or index > branch.chain_pages:
                spare.append(page)
        if branch.claimed is not None:
            branch.claimed.has_writer = False
        self.allocator.free(spare)
        self.tree.release(added)
        branch.num_pages, branch.claimed = branch.chain_pages, None

    def resident_tokens(self, tokens: Int32, realm: Realm) -> int:
        """Leading tokens whose KV is stored, or computed by steps already issued."""
        nodes, tail, shared = self.tree.match(token_key(tokens), realm)
        for index, node in enumerate(nodes):
            if node.planned < self.page_size:
                return index * self.page_size + node.planned
        partial = min(shared, tail.planned) if tail is not None else 0
        return len(nodes) * self.page_size + partial

    def check_idle(self, pinned: Mapping[PageNode, int]) -> None:
        """Raises RuntimeError unless every page is free, pinned or cached, and the tree is sound.

        `pinned` says how many pins hold a page.
        """
        nodes = self.tree.nodes()
        held = [n.page for n in nodes if n.refs != pinned.get(n, 0) or n.has_writer]
        if held:
            raise RuntimeError(f"pages {held} are held by nobody's sequences")
        total = self.allocator.num_pages
        pages = {node.page for node in nodes if not self.allocator.is_free(node.page)}
        attached = sum(node.attached for node in pinned)
        counts = (len(nodes), self.tree.num_pages, self.tree.num_unreferenced + attached)
        lost = len(pinned) - attached  # not in the tree any more, and freed with their pin
        total -= lost
        if set(counts) != {len(pages)} or self.allocator.num_free + len(pages) != total:
            raise RuntimeError(
                f"{self.allocator.num_free} pages are free and {counts} cached, of {total}"
            )

    def _allocate_beside(
        self, source: PageNode | None, count: int
    ) -> tuple[Int32, PageNode | None] | None:
        """Pages, and the source of a copy, held; without it where it is in the way."""
        if source is not None:
            self.tree.retain([source])
            pages = self.allocate(count)
            if pages is not None:
                return pages, source
            self.tree.release([source])
        pages = self.allocate(count)
        return None if pages is None else (pages, None)

    def _insert(self, nodes: list[PageNode], key: bytes, realm: Realm, pages: Int32) -> None:
        size = self.page_size * TOKEN_BYTES
        in_trunk = max(0, realm.trunk.tokens // self.page_size - len(nodes))
        for run in (pages[:in_trunk].tolist(), pages[in_trunk:].tolist()):
            if run:
                parent, start = self.tree.parent(nodes, realm), len(nodes) * size
                nodes += self.tree.insert_run(parent, key[start : start + len(run) * size], run)

    def _adopt_claimed(self, node: PageNode, key: bytes, known: PageNode | None) -> PageNode | None:
        """The page behind which the next one goes; None: there is none."""
        if known is not None:
            return known if known.planned == known.size else None
        if not node.attached:
            return None
        self.tree.extend_key(node, key)
        node.planned = node.size
        return node


def _claims(branch: Branch, tail: PageNode) -> bool:
    """The branch may go on in its chain's own tail page."""
    return tail.size == branch.tail_tokens and not tail.has_writer
