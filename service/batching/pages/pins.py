"""Pages of registered prefixes that stay in the cache, whoever else needs room."""

from collections import Counter
from collections.abc import Mapping

from stemserve.service.batching.pages.kv_cache import KvCache
from stemserve.service.batching.pages.page_node import PageNode, token_key
from stemserve.service.errors import QuotaExceeded
from stemserve.service.request import Int32, Realm

PINNED_PART = 0.5  # of the pool, at most


class Pins:
    """Each pin has a key of its owner's choice. A page may be under several."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._nodes: dict[str, list[PageNode]] = {}
        self._counts: Counter[PageNode] = Counter()

    @property
    def pages(self) -> int:
        return len(self._counts)

    @property
    def counts(self) -> Mapping[PageNode, int]:
        return self._counts

    def pin(self, key: str, tokens: Int32, realm: Realm, *, largest_job: int) -> int:
        """Hold what is computed of a sequence, and say how many tokens that are.

        `largest_job` pages must stay for the largest of the running and waiting jobs. Raises
        QuotaExceeded. Pinning under a known key replaces its pin.
        """
        nodes = self._computed(tokens, realm)
        total = self._cache.allocator.num_pages
        pages = self.pages + sum(node not in self._counts for node in nodes)
        if pages > min(int(PINNED_PART * total), total - largest_job):
            raise QuotaExceeded(
                f"pinned prefixes would hold {pages} of the cache's {total} pages; at most half "
                "may be pinned, and running calls need room: release some, or do without the pin",
                subject="pinned_pages",
                retry_after_s=0.0,
            )
        self._cache.tree.retain(nodes)
        self.unpin(key)
        self._nodes[key] = nodes
        self._counts.update(nodes)
        # The last page may hold more than the sequence.
        return min(len(tokens), sum(node.size for node in nodes))

    def unpin(self, key: str) -> None:
        """A key that is not known holds nothing."""
        nodes = self._nodes.pop(key, [])
        self._counts.subtract(nodes)
        self._counts += Counter()  # drops what is at 0
        self._cache.tree.release(nodes)

    def _computed(self, tokens: Int32, realm: Realm) -> list[PageNode]:
        nodes, tail, shared = self._cache.tree.match(token_key(tokens), realm)
        for index, node in enumerate(nodes):
            if node.planned < node.size:
                return nodes[:index]
        rest = len(tokens) - sum(node.size for node in nodes)
        if tail is not None and shared == rest and tail.planned >= rest:
            nodes.append(tail)
        return nodes
