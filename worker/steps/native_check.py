"""Whether the arrays of a plan are right, in C: a tenth of the time that checks.py takes.

It only says that all is well. Where it does not, checks.py looks again and says what is wrong.
"""

import ctypes
import logging
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from stemserve.kernels.c_library import CLibraryError, load_library
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.steps.checks import KERNELS, SEGMENT_KINDS, StepLimits

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent.parent / "csrc" / "step_check.c"
# In the order of `plan` in the source.
ARRAYS = (
    *("token_ids", "positions", "kv_slots"),
    *("node_parent", "node_page_indptr", "node_pages", "node_tokens"),
    *("segment_indptr", "segment_kind", "segment_node", "segment_kernel"),
    *("gather_rows", "gather_indptr", "gather_ids"),
)
# What a plan is found to be; see the source.
RIGHT, SLOTS_ASCEND, ONE_TREE, READS_SLOTS = 1, 2, 4, 8

_Limits = ctypes.c_int32 * 11
_Counts = ctypes.c_int64 * len(ARRAYS)
_Arrays = ctypes.c_char_p * len(ARRAYS)


class NativeCheck:
    """Raises CLibraryError."""

    def __init__(self, limits: StepLimits) -> None:
        self._check = load_library([SOURCE]).stemserve_step_check
        self._check.argtypes = [_Limits, _Counts, _Arrays]
        self._limits = _Limits(
            *(limits.vocab_size, limits.context_tokens, limits.page_size, limits.kv_pages),
            *(limits.sampler_slots, limits.max_step_tokens),
            *(worker_pb2.SEGMENT_KIND_PREFILL, worker_pb2.SEGMENT_KIND_DECODE),
            *(worker_pb2.SEGMENT_KIND_ITEM, SEGMENT_KINDS, KERNELS),
        )

    def __call__(self, blobs: Sequence[bytes]) -> int:
        """Of one step, in the order of ARRAYS, each of whole numbers of four bytes. 0: unknown."""
        counts = _Counts(*[len(blob) >> 2 for blob in blobs])
        found: int = self._check(self._limits, counts, _Arrays(*blobs))
        return found


@cache
def native_check(limits: StepLimits) -> NativeCheck | None:
    """None, with a warning, where its library cannot be made."""
    if sys.byteorder != "little":  # as the arrays are
        return None
    try:
        return NativeCheck(limits)
    except CLibraryError as error:
        log.warning("plans are checked in numpy, several times slower: %s", error)
        return None
