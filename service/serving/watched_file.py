"""A file's content, read again when the file changes."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

CHECK_S = 1.0  # a file is looked at this often at most

_log = logging.getLogger(__name__)


class WatchedFile(Generic[T]):
    """Keeps the last good content while the file is being replaced, or holds something unreadable.

    Files of a Kubernetes secret are swapped as a whole, under another inode. Safe from any thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        parse: Callable[[str], T],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises what reading or `parse` raises: a server must not start with a bad file."""
        self._path = path
        self._parse = parse
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._value = parse(path.read_text())
        self._looked = clock()

    @property
    def value(self) -> T:
        with self._lock:
            now = self._clock()
            if now - self._looked >= CHECK_S:
                self._looked = now
                self._refresh()
            return self._value

    def _refresh(self) -> None:
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return
            self._value = self._parse(self._path.read_text())
        except Exception as error:  # of any parser; the server goes on with what it had
            _log.error("%s cannot be read, the old content stays in force: %s", self._path, error)
            return
        self._seen = stamp
        _log.info("%s was read again", self._path)

    def _stamp(self) -> tuple[int, int, int]:
        stat = self._path.stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
