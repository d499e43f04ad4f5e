"""Plans to a worker and results from it: over gRPC, or on one machine over a plain Unix socket.

Over the socket a step waits and costs a fraction (docs/decisions/0009).
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from stemserve.proto.v1 import worker_pb2, worker_pb2_grpc
from stemserve.step_link import framed, received

OnResult = Callable[[worker_pb2.StepResult], None]
OnEnd = Callable[[str], None]

ENDED = "it ended its stream"


class StepStream(Protocol):
    def open(self, on_result: OnResult, on_end: OnEnd) -> None:
        """The callbacks run on a thread of the stream, `on_end` once, with the reason."""
        ...

    def send(self, plan: worker_pb2.StepPlan) -> None:
        """Never waits."""
        ...

    def close(self) -> None:
        """May be called twice, not from a callback. No callback runs when it returns."""
        ...


class RpcStream:
    """The Run RPC."""

    def __init__(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        self._plans: SimpleQueue[worker_pb2.StepPlan | None] = SimpleQueue()
        self._run = stub.Run(self._requests())
        self._reader: threading.Thread | None = None

    def open(self, on_result: OnResult, on_end: OnEnd) -> None:
        self._reader = threading.Thread(
            target=self._read, args=(on_result, on_end), name="worker-results"
        )
        self._reader.start()

    def send(self, plan: worker_pb2.StepPlan) -> None:
        self._plans.put(plan)

    def close(self) -> None:
        self._plans.put(None)
        self._run.cancel()
        if self._reader is not None:
            self._reader.join()

    def _requests(self) -> Iterator[worker_pb2.RunRequest]:
        while (plan := self._plans.get()) is not None:
            yield worker_pb2.RunRequest(plan=plan)

    def _read(self, on_result: OnResult, on_end: OnEnd) -> None:
        reason = ENDED
        try:
            for response in self._run:
                on_result(response.result)
        except grpc.RpcError as error:
            reason = explained(error)
        self._plans.put(None)
        on_end(reason)


class SocketStream:
    """A step socket. Whoever sends a plan writes it; what the socket does not take at once, because
    the worker is slow to read, is written by a thread."""

    def __init__(self, path: str) -> None:
        """Raises OSError, at once, if nobody listens there or too many wait."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.connect(path)
            self._socket.setblocking(True)
        except OSError as error:
            self._socket.close()
            raise OSError(f"{path}: {error}") from error
        self._lock = threading.Lock()  # of what is sent
        self._unsent: SimpleQueue[memoryview | None] = SimpleQueue()
        self._waiting = 0  # parts that the thread has not written yet
        self._threads: list[threading.Thread] = []

    def open(self, on_result: OnResult, on_end: OnEnd) -> None:
        self._threads = [
            threading.Thread(target=self._read, args=(on_result, on_end), name="worker-results"),
            threading.Thread(target=self._write, name="worker-plans"),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, plan: worker_pb2.StepPlan) -> None:
        rest = memoryview(framed(worker_pb2.RunRequest(plan=plan)))
        with self._lock:
            if not self._waiting:
                rest = rest[self._sent_at_once(rest) :]
            if rest:
                self._waiting += 1
                self._unsent.put(rest)

    def close(self) -> None:
        self._end()
        for thread in self._threads:
            thread.join()
        self._socket.close()

    def _sent_at_once(self, frame: memoryview) -> int:
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._hang_up()
            return len(frame)

    def _read(self, on_result: OnResult, on_end: OnEnd) -> None:
        reason = ENDED
        try:
            for body in received(self._socket):
                response = worker_pb2.RunResponse.FromString(body)
                if response.refusal:
                    reason = response.refusal
                    break
                on_result(response.result)
        except (OSError, DecodeError, MemoryError) as error:
            reason = f"{error}" or type(error).__name__
        self._end()
        on_end(reason)

    def _write(self) -> None:
        while (part := self._unsent.get()) is not None:
            try:
                self._socket.sendall(part)
            except OSError:
                self._hang_up()
            with self._lock:
                self._waiting -= 1

    def _end(self) -> None:
        self._hang_up()
        self._unsent.put(None)

    def _hang_up(self) -> None:
        """Wakes both threads; the one that reads tells of the end. A worker that has missed a plan,
        or a part of one, must get no other."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def explained(error: grpc.RpcError) -> str:
    # The sync stub raises errors that are calls too; the stubs do not say so.
    code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    return f"{code}: {details}"
