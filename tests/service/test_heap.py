"""That the allocator keeps what is freed, seen by the page faults of a large message."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from stemserve.service.serving.heap import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
BYTES, PARTS, TIMES = 1 << 18, 8, 50
message = [bytes(BYTES) for _ in range(PARTS)]
del message
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(TIMES):
    message = [bytearray(b"x") * BYTES for _ in range(PARTS)]
    del message
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults / TIMES)
"""


def faults_a_message(setting: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, setting], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the C library has no mallopt")
def test_a_message_as_large_as_the_last_takes_no_new_pages() -> None:
    pages = (1 << 21) // 4096
    assert faults_a_message("leave") > 0.5 * pages
    assert faults_a_message("keep") < 0.1 * pages
