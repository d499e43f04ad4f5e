"""Keep freed memory for the next message, instead of giving it back to the kernel.

glibc returns the end of its heap once 128 KiB of it are free. A large call's arrays and messages
then come in pages that are new to the process, each with a fault, again and again: half the time
that such a call took.
"""

import ctypes
import logging

# mallopt's parameters, from malloc.h.
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
KEPT_BYTES = 128 << 20  # at most, of what is free at the end of a heap
MAPPED_BYTES = 32 << 20  # a block this large gets pages of its own; no more is allowed

_log = logging.getLogger(__name__)


def keep_freed_memory() -> bool:
    """Whether the C library can be told so; what comes is the same either way."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        _log.info("the C library has no mallopt: large messages cost more page faults")
        return False
    return bool(mallopt(MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(TRIM_THRESHOLD, KEPT_BYTES))
