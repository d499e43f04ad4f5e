"""Run one worker as a child process that can never outlive the service."""

import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

_log = logging.getLogger(__name__)

# glibc raises its threshold for blocks of their own as it goes, and buffers of the size of logits
# then leave holes: the worker grew by half over 16,000 calls. A fixed threshold keeps it flat.
# A fixed one also gives freed memory back at once, for faults at the next step, unless told not to.
ALLOCATION = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}


class WorkerProcess:
    """The child, its socket, and the pipe whose closing tells the child that the service is gone.

    The kernel closes the pipe however the service ends, kill -9 included. The child has a session
    of its own: Ctrl-C in the terminal reaches the service only, which then drains.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """`command` gets `--listen ADDRESS --parent-fd FD` appended."""
        self._folder = tempfile.TemporaryDirectory(prefix="stemserve-", ignore_cleanup_errors=True)
        self.credentials: grpc.ChannelCredentials | None = None  # nobody else reaches the socket
        self.address = f"unix:{Path(self._folder.name) / 'worker.sock'}"
        self._stopping = threading.Lock()
        read_fd, self._parent_fd = os.pipe()
        try:
            self._child = subprocess.Popen(
                [*command, "--listen", self.address, "--parent-fd", str(read_fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=(read_fd,),
                start_new_session=True,
                env=ALLOCATION | os.environ,
            )
        except OSError:
            os.close(self._parent_fd)
            self._folder.cleanup()
            raise
        finally:
            os.close(read_fd)
        _log.info("started worker process %d on %s", self._child.pid, self.address)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ended(self) -> str | None:
        """How the process ended, or None while it runs."""
        code = self._child.poll()
        if code is None:
            return None
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the worker process ended {how}"

    def stop(self, *, grace_s: float) -> None:
        """Ask, wait, then kill. Returns when the process is gone; may be called again."""
        with self._stopping:
            self._stop(grace_s)

    def _stop(self, grace_s: float) -> None:
        if self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(grace_s)
            except subprocess.TimeoutExpired:
                _log.warning("worker %d ignores SIGTERM: killing it", self._child.pid)
                self._child.kill()
                self._child.wait()
        if self._parent_fd >= 0:
            os.close(self._parent_fd)
            self._parent_fd = -1
        self._folder.cleanup()

    def kill(self) -> None:
        """End the process at once, without waiting."""
        self._child.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(grace_s=5.0)
