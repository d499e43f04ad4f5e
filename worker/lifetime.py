"""What ends the worker: a signal, the end of its parent, or the loss of its device."""

import os
import select
import signal
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Self

EXIT_DEVICE_LOST = 1


class Stopped(Exception):
    """The worker was told to end before it served."""


class Lifetime:
    """The parent holds the other end of `parent_fd` open for as long as it wants the worker."""

    def __init__(self, parent_fd: int | None) -> None:
        self._parent_fd = parent_fd
        self._wake_read, self._wake_write = os.pipe()
        self._exit_code = 0
        self._is_told = False

    @classmethod
    @contextmanager
    def watched(cls, parent_fd: int | None) -> Generator[Self]:
        lifetime = cls(parent_fd)
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, lifetime._on_signal) for number in signals}
        # A signal just before `select` would not end it: the handler runs only after it.
        os.set_blocking(lifetime._wake_write, False)
        wakeup_before = signal.set_wakeup_fd(lifetime._wake_write)
        try:
            yield lifetime
        finally:
            signal.set_wakeup_fd(wakeup_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(lifetime._wake_read)
            os.close(lifetime._wake_write)

    def check(self) -> None:
        """Raises Stopped once the worker should end."""
        if self._is_over(0):
            raise Stopped

    def wait(self) -> int:
        """The exit code, once the worker should end."""
        self._is_over(None)
        return self._exit_code

    def lose_device(self) -> None:
        self._exit_code = EXIT_DEVICE_LOST
        os.write(self._wake_write, b"d")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """A second one does not wait for a step, which may hang."""
        if self._is_told:
            os._exit(128 + number)
        self._is_told = True
        os.write(self._wake_write, b"s")

    def _is_over(self, timeout_s: float | None) -> bool:
        watched = [self._wake_read]
        if self._parent_fd is not None:
            watched.append(self._parent_fd)  # readable at its end: nobody writes into it
        return bool(select.select(watched, [], [], timeout_s)[0])
