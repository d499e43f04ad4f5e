"""Take plans over a Unix socket of their own, where a step waits for less than over gRPC.

Nothing here needs a model, so that whatever answers plans can be behind it.
"""

import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from google.protobuf.message import DecodeError

from stemserve.proto.v1 import worker_pb2
from stemserve.step_link import framed, received

Plans = Iterator[worker_pb2.StepPlan]
Results = Callable[[Plans, "StepCaller"], Generator[worker_pb2.StepResult]]

_BACKLOG = 8
_PAUSE_S = 0.1  # after a connection that could not be taken, for want of file descriptors

_log = logging.getLogger(__name__)


class StepSocket:
    """Serves inside `with`; each connection has a thread."""

    def __init__(self, path: Path, results: Results, refusals: tuple[type[Exception], ...]) -> None:
        """`results` of a connection's plans; its `refusals` are told to the other side.

        Raises OSError if `path` cannot be listened on.
        """
        self._path = path
        self._results = results
        self._refusals = refusals
        self._listener = _listener(path)
        self._callers: dict[threading.Thread, StepCaller] = {}
        self._is_stopping = False
        self._accepting = threading.Thread(target=self._accept, name="step-socket")

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(grace_s=0.0)

    def stop(self, *, grace_s: float) -> None:
        """No more connections; those that are open have so long to end by themselves."""
        self._is_stopping = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._accepting.join()
        self._listener.close()
        self._path.unlink(missing_ok=True)
        for thread, caller in list(self._callers.items()):
            thread.join(grace_s)
            caller.leave()
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_stopping:
                    return
                _log.warning("cannot take a connection for steps: %s", error)
                time.sleep(_PAUSE_S)
                continue
            caller = StepCaller(connection)
            thread = threading.Thread(
                target=self._serve, args=(connection, caller), name="step-results"
            )
            self._callers = {t: c for t, c in self._callers.items() if t.is_alive()}
            self._callers[thread] = caller
            thread.start()

    def _serve(self, connection: socket.socket, caller: "StepCaller") -> None:
        with connection, suppress(OSError), closing(self._results(caller.plans(), caller)) as found:
            try:
                for result in found:
                    connection.sendall(framed(worker_pb2.RunResponse(result=result)))
            except self._refusals as error:
                connection.sendall(framed(worker_pb2.RunResponse(refusal=str(error))))
            finally:
                caller.leave()


class StepCaller:
    """The service at the other end of a connection; active until it has closed it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._is_active = True
        self._callbacks: list[Callable[[], None]] = []

    def is_active(self) -> bool:
        return self._is_active

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """To be called when it is no longer active; False: it is not now."""
        with self._lock:
            if self._is_active:
                self._callbacks.append(callback)
            return self._is_active

    def plans(self) -> Plans:
        """As they come. What is no plan ends the connection."""
        try:
            for body in received(self._connection):
                yield worker_pb2.RunRequest.FromString(body).plan
        except (OSError, DecodeError, MemoryError) as error:
            _log.warning("a connection for steps ends: %s", error)
        finally:
            self.leave()

    def leave(self) -> None:
        """No longer active; whoever reads or writes is woken."""
        with self._lock:
            self._is_active = False
            callbacks, self._callbacks = self._callbacks, []
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        for callback in callbacks:
            callback()


def _listener(path: Path) -> socket.socket:
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()  # of a worker that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
