"""The service's end of a step socket, beside workers that are slow, refuse, or talk rubbish."""

import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stemserve.proto.v1 import worker_pb2
from stemserve.service.workers.step_streams import SocketStream
from stemserve.step_link import framed, received

PATIENCE_S = 30.0
LARGE_BYTES = 3 << 20  # more than a socket's buffer takes


@dataclass(frozen=True, kw_only=True)
class Link:
    """Both ends; the worker's reads and writes only what a test does with it."""

    stream: SocketStream
    worker: socket.socket
    results: queue.SimpleQueue[worker_pb2.StepResult]
    ends: queue.SimpleQueue[str]


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    path = str(tmp_path / "steps")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        stream = SocketStream(path)
        worker, _ = listener.accept()
    made = Link(stream=stream, worker=worker, results=queue.SimpleQueue(), ends=queue.SimpleQueue())
    stream.open(made.results.put, made.ends.put)
    with worker:
        yield made
    stream.close()


def plan_of(step_id: int, token_bytes: int = 12) -> worker_pb2.StepPlan:
    return worker_pb2.StepPlan(step_id=step_id, token_ids=bytes(token_bytes))


def answer(step_id: int) -> bytes:
    return framed(worker_pb2.RunResponse(result=worker_pb2.StepResult(step_id=step_id)))


def test_a_worker_that_does_not_read_holds_nobody_up_and_hears_all_plans_in_order(
    link: Link,
) -> None:
    sizes = [12, LARGE_BYTES, 12, LARGE_BYTES, 12, 0]

    def send() -> None:
        for step_id, size in enumerate(sizes):
            link.stream.send(plan_of(step_id, size))

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    sender.join(PATIENCE_S)
    assert not sender.is_alive()
    bodies = received(link.worker)
    plans = [worker_pb2.RunRequest.FromString(next(bodies)).plan for _ in sizes]
    assert [(plan.step_id, len(plan.token_ids)) for plan in plans] == list(enumerate(sizes))
    link.stream.send(plan_of(9))
    assert worker_pb2.RunRequest.FromString(next(bodies)).plan.step_id == 9


def test_closing_ends_what_waits_for_a_worker_that_does_not_read(link: Link) -> None:
    for step_id in range(4):
        link.stream.send(plan_of(step_id, LARGE_BYTES))
    link.stream.close()
    assert link.ends.qsize() == 1
    link.stream.send(plan_of(5))
    link.stream.close()


def test_a_plan_that_cannot_be_sent_ends_the_stream(link: Link) -> None:
    link.worker.shutdown(socket.SHUT_RD)  # what it sends goes on
    link.stream.send(plan_of(1))
    assert link.ends.get(timeout=PATIENCE_S) == "it ended its stream"


def test_results_that_come_in_pieces_and_together(link: Link) -> None:
    sent = answer(1) + answer(2) + answer(3)
    for start in range(0, len(sent), 5):
        link.worker.sendall(sent[start : start + 5])
    assert [link.results.get(timeout=PATIENCE_S).step_id for _ in range(3)] == [1, 2, 3]
    link.worker.sendall(sent)
    assert [link.results.get(timeout=PATIENCE_S).step_id for _ in range(3)] == [1, 2, 3]
    assert link.ends.empty()


@pytest.mark.parametrize(
    ("last_words", "reason"),
    [
        (b"", "it ended its stream"),
        (framed(worker_pb2.RunResponse(refusal="no room")), "no room"),
        (answer(2)[:-1], "in the middle of a message"),
        (answer(2)[:3], "in the middle of a message"),
        (b"\x03\x00\x00\x00\xff\xff\xff", "Error parsing message"),
    ],
    ids=["end", "refusal", "half a message", "half a length", "rubbish"],
)
def test_the_end_comes_once_with_its_reason(link: Link, last_words: bytes, reason: str) -> None:
    link.worker.sendall(answer(1) + last_words)
    link.worker.shutdown(socket.SHUT_WR)
    assert link.results.get(timeout=PATIENCE_S).step_id == 1
    assert reason in link.ends.get(timeout=PATIENCE_S)
    link.stream.send(plan_of(5))
    link.stream.close()
    assert link.ends.empty() and link.results.empty()
