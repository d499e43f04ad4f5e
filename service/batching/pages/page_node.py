"""One page of the cache's index, and how its neighbours are found."""

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

from stemserve.service.request import Int32

TOKEN_BYTES = 4
_KEY = attrgetter("key")


def token_key(tokens: Int32) -> bytes:
    """Token ids as the bytes that they are: the tree keeps no hash. Their order is not that of the
    ids; in any order of bytes, those that share the most of their beginning are neighbours."""
    return tokens.tobytes()


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two keys share."""
    end = min(len(a), len(b))
    for at in range(0, end, TOKEN_BYTES):
        if a[at : at + TOKEN_BYTES] != b[at : at + TOKEN_BYTES]:
            return at // TOKEN_BYTES
    return end // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class PageNode:
    """A page with the KV of `key`'s tokens, behind its parent's. One that is not full is a leaf.

    The root of a salt has no page and the salt as its key; its parent is the page that the salt's
    tokens go on behind, or None.
    """

    page: int
    key: bytes
    parent: "PageNode | None"
    refs: int = 0  # sequences that hold the page
    planned: int = 0  # leading tokens that issued steps compute
    has_writer: bool = False  # a generation goes on in the slots behind the key's tokens
    attached: bool = True  # can be found in the tree
    used: int = 0  # tick of the last release
    # A large cache has many pages, which the garbage collector looks at: no empty containers.
    children: list["PageNode"] | None = None  # sorted by key; None: none
    roots: dict[bytes, "PageNode"] | None = None  # behind it

    @property
    def is_root(self) -> bool:
        return self.page < 0

    @property
    def is_leaf(self) -> bool:
        return not self.children and not self.roots

    @property
    def size(self) -> int:
        return len(self.key) // TOKEN_BYTES

    def below(self) -> list["PageNode"]:
        return [*(self.children or ()), *(self.roots or {}).values()]


def child(node: PageNode, key: bytes) -> PageNode | None:
    """The page behind it with these tokens."""
    children = node.children
    if not children:
        return None
    at = bisect_left(children, key, key=_KEY)
    return children[at] if at < len(children) and children[at].key == key else None


def closest(node: PageNode, rest: bytes) -> tuple[PageNode | None, int]:
    """The child that shares the most tokens with `rest`: in sorted order it is a neighbour."""
    children = node.children
    if not children:
        return None, 0
    at = bisect_left(children, rest, key=_KEY)
    best: PageNode | None = None
    best_tokens = 0
    for index in (at, at - 1):
        if 0 <= index < len(children):
            shared = common_tokens(children[index].key, rest)
            if shared > best_tokens:
                best, best_tokens = children[index], shared
    return best, best_tokens


def link(parent: PageNode, node: PageNode) -> None:
    if parent.children is None:
        parent.children = [node]
        return
    parent.children.insert(bisect_left(parent.children, node.key, key=_KEY), node)


def unlink(node: PageNode) -> PageNode:
    parent = node.parent
    if parent is None or parent.children is None:
        raise RuntimeError("the root of a salt holds no page")
    del parent.children[bisect_left(parent.children, node.key, key=_KEY)]
    if not parent.children:
        parent.children = None
    return parent
