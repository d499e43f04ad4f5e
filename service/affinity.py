"""Whether the calls that a router sent here found their prefix here."""

from collections import OrderedDict
from typing import Final

KEYS_KEPT = 32_768

HOME: Final = "home"  # some of it was cached
EVICTED: Final = "evicted"  # the key was here before, but nothing of its prefix is left
FIRST: Final = "first"  # the key was not here before, as far as is remembered
MOVED: Final = "moved"  # a registered prefix that is not registered here
NO_KEY: Final = "nokey"  # the call had no routing key
OUTCOMES = (HOME, EVICTED, FIRST, MOVED, NO_KEY)


class AffinityLog:
    """Remembers the keys of late; not to be shared by threads."""

    def __init__(self, keys_kept: int = KEYS_KEPT) -> None:
        self._keys_kept = keys_kept
        self._seen: OrderedDict[int, None] = OrderedDict()  # hashes; the latest last

    def outcome(self, tenant: str, key: str, *, found: bool) -> str:
        if not key:
            return NO_KEY
        seen = hash((tenant, key))
        is_known = seen in self._seen
        self._seen[seen] = None
        self._seen.move_to_end(seen)
        if len(self._seen) > self._keys_kept:
            self._seen.popitem(last=False)
        if found:
            return HOME
        return EVICTED if is_known else FIRST
