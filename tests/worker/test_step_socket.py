"""Plans over a step socket: of a real worker process, and of one that answers without a model."""

import signal
import socket
import stat
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.worker.test_process import START_S, Worker, request, scored_prompt, start
from tests.worker.tiny_model import COSTS, save_tiny_model

from stemserve.kernels.pricing.cost_table_file import tables_json
from stemserve.proto.v1 import worker_pb2
from stemserve.step_link import framed, received, step_socket
from stemserve.worker.step_socket import Plans, StepCaller, StepSocket


class Refused(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "costs.json").write_text(tables_json([COSTS]))
    save_tiny_model(path, seed=3)
    return path


@pytest.fixture(scope="module")
def worker(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    yield from start(folder, tmp_path_factory.mktemp("socket") / "w.sock")


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(START_S)
    connection.connect(step_socket(str(path)))
    return connection


def responses(connection: socket.socket) -> Iterator[worker_pb2.RunResponse]:
    return map(worker_pb2.RunResponse.FromString, received(connection))


def test_results_equal_those_of_the_rpc(worker: Worker) -> None:
    assert worker.stub.Describe(worker_pb2.DescribeRequest()).step_socket
    requests = [request(scored_prompt([5, 6, 7 + i]), i) for i in range(4)]
    expected = [response.result for response in worker.stub.Run(iter(requests))]
    with connected(worker.socket) as connection:
        answers = responses(connection)
        for step in requests:
            connection.sendall(framed(step))
        found = [next(answers).result for _ in requests]
    assert [result.step_id for result in found] == [0, 1, 2, 3]
    assert [r.gather_logprobs for r in found] == [r.gather_logprobs for r in expected]


def test_the_step_socket_is_for_its_owner_only(worker: Worker) -> None:
    path = Path(step_socket(str(worker.socket)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_service_is_refused_while_the_first_is_there(worker: Worker) -> None:
    with connected(worker.socket) as first:
        first.sendall(framed(request(scored_prompt([1]), 1)))
        assert next(responses(first)).result.step_id == 1
        with connected(worker.socket) as second:
            answers = responses(second)
            assert next(answers).refusal == "another service runs steps here"
            assert list(answers) == []
    with connected(worker.socket) as third:
        third.sendall(framed(request(scored_prompt([1]), 3)))
        assert next(responses(third)).result.step_id == 3


@pytest.mark.parametrize(
    "rubbish", [b"\x01", b"\x04\x00\x00\x00ab", b"\x02\x00\x00\x00\xff\xff"], ids=repr
)
def test_rubbish_ends_only_its_connection(worker: Worker, rubbish: bytes) -> None:
    with connected(worker.socket) as bad:
        bad.sendall(rubbish)
        bad.shutdown(socket.SHUT_WR)
        assert list(responses(bad)) == []
    with connected(worker.socket) as good:
        good.sendall(framed(request(scored_prompt([1]), 3)))
        assert next(responses(good)).result.step_id == 3


def test_a_length_that_no_message_has_ends_its_connection_at_once(worker: Worker) -> None:
    with connected(worker.socket) as bad:
        bad.sendall(b"\xff\xff\xff\xff")
        assert list(responses(bad)) == []


def test_an_open_step_socket_is_told_that_the_worker_stops(folder: Path, tmp_path: Path) -> None:
    for worker in start(folder, tmp_path / "w.sock"):
        with connected(worker.socket) as connection:
            answers = responses(connection)
            connection.sendall(framed(request(scored_prompt([1]), 1)))
            assert next(answers).result.step_id == 1
            worker.process.send_signal(signal.SIGTERM)
            assert next(answers).refusal == "the worker is stopping"
            assert list(answers) == []
            assert worker.process.wait(START_S) == 0
    assert not Path(step_socket(str(tmp_path / "w.sock"))).exists()


def test_the_socket_of_a_killed_worker_is_replaced_and_its_caller_may_leave(
    tmp_path: Path,
) -> None:
    left = threading.Event()

    def results(plans: Plans, caller: StepCaller) -> Generator[worker_pb2.StepResult]:
        caller.add_callback(left.set)
        for plan in plans:
            yield worker_pb2.StepResult(step_id=plan.step_id)
        raise Refused("enough")

    path = tmp_path / "worker"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(step_socket(str(path)))
    with StepSocket(Path(step_socket(str(path))), results, (Refused,)):
        with closing(connected(path)) as connection:
            connection.sendall(framed(request(scored_prompt([1]), 7)))
            assert next(responses(connection)).result.step_id == 7
            assert not left.is_set()
        assert left.wait(START_S)


def test_a_caller_that_does_not_read_ends_with_the_socket(tmp_path: Path) -> None:
    def results(plans: Plans, caller: StepCaller) -> Generator[worker_pb2.StepResult]:
        for _ in plans:
            while True:
                yield worker_pb2.StepResult(sampled_tokens=bytes(1 << 20))

    path = tmp_path / "worker"
    with (
        StepSocket(Path(step_socket(str(path))), results, ()) as served,
        closing(connected(path)) as connection,
    ):
        connection.sendall(framed(request(scored_prompt([1]), 7)))
        assert connection.recv(1)
        served.stop(grace_s=0.1)
        assert sum(map(len, iter(lambda: connection.recv(1 << 20), b""))) > 0
