"""The client of one worker, against a real worker process that computes nothing."""

import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from stemserve.proto.v1 import worker_pb2
from stemserve.service.workers import worker_client
from stemserve.service.workers.worker_client import WorkerClient, WorkerUnreachable
from stemserve.step_link import step_socket

StartWorker = Callable[..., str]

over_both = pytest.mark.parametrize("tcp", [False, True], ids=["step-socket", "grpc"])


def never() -> None:
    return None


def plan_of(step_id: int, rows: int = 3) -> worker_pb2.StepPlan:
    zeros = np.zeros(rows, np.int32).tobytes()
    return worker_pb2.StepPlan(step_id=step_id, token_ids=zeros, positions=zeros, kv_slots=zeros)


def test_describe_waits_until_the_model_is_loaded(fake_worker: StartWorker) -> None:
    client = WorkerClient(fake_worker("--describe-seconds", 0.5, "--kv-pages", 77))
    started = time.monotonic()
    facts = client.describe(timeout_s=60.0, give_up=never)
    client.close()
    assert (facts.kv_pages, facts.has_lm_head, facts.steps_in_flight) == (77, True, 2)
    assert time.monotonic() - started >= 0.5


def test_describe_gives_up_with_the_given_reason() -> None:
    client = WorkerClient("unix:/nowhere/worker.sock")
    with pytest.raises(WorkerUnreachable, match="it ended with exit code 3"):
        client.describe(timeout_s=60.0, give_up=lambda: "it ended with exit code 3")
    client.close()


def test_describe_names_the_address_that_does_not_answer() -> None:
    client = WorkerClient("unix:/nowhere/worker.sock")
    with pytest.raises(WorkerUnreachable, match=r"worker unix:/nowhere/worker\.sock: DEADLINE"):
        client.describe(timeout_s=0.3, give_up=never)
    client.close()


def test_a_worker_that_does_not_answer_is_logged_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_client, "REPORT_S", 0.2)
    caplog.set_level("INFO")
    client = WorkerClient("unix:/nowhere/worker.sock")
    with pytest.raises(WorkerUnreachable, match="No such file"):
        client.describe(timeout_s=1.0, give_up=never)
    client.close()
    assert "worker unix:/nowhere/worker.sock does not answer yet" in caplog.text
    assert "No such file" in caplog.text


@over_both
def test_results_come_in_order_of_the_plans(fake_worker: StartWorker, tcp: bool) -> None:
    client = WorkerClient(fake_worker(tcp=tcp))
    client.describe(timeout_s=60.0, give_up=never)
    results: queue.SimpleQueue[worker_pb2.StepResult] = queue.SimpleQueue()
    losses: list[str] = []
    client.open(on_result=results.put, on_lost=losses.append)
    for step_id in range(20):
        client.send(plan_of(step_id))
    assert [results.get(timeout=30.0).step_id for _ in range(20)] == list(range(20))
    client.close()
    assert losses == []


@over_both
def test_a_plan_with_the_biases_of_many_samples_reaches_the_worker(
    fake_worker: StartWorker, tcp: bool
) -> None:
    client = WorkerClient(fake_worker(tcp=tcp))
    client.describe(timeout_s=60.0, give_up=never)
    results: queue.SimpleQueue[worker_pb2.StepResult] = queue.SimpleQueue()
    losses: queue.SimpleQueue[str] = queue.SimpleQueue()
    client.open(on_result=results.put, on_lost=losses.put)
    plan = plan_of(1)
    plan.samplers.add(bias_values=bytes(100 << 20))
    client.send(plan)
    assert results.get(timeout=30.0).step_id == 1
    client.close()
    assert losses.empty()


@over_both
def test_a_killed_worker_is_reported_once(fake_worker: StartWorker, tcp: bool) -> None:
    client = WorkerClient(fake_worker("--die-at-step", 2, tcp=tcp))
    client.describe(timeout_s=60.0, give_up=never)
    results: queue.SimpleQueue[worker_pb2.StepResult] = queue.SimpleQueue()
    losses: queue.SimpleQueue[str] = queue.SimpleQueue()
    client.open(on_result=results.put, on_lost=losses.put)
    client.send(plan_of(1))
    assert results.get(timeout=30.0).step_id == 1
    client.send(plan_of(2))
    assert f"worker {client.address}: " in losses.get(timeout=30.0)
    client.close()
    client.close()
    assert losses.empty()


def test_predict_answers_without_running_the_plan(fake_worker: StartWorker) -> None:
    client = WorkerClient(fake_worker())
    client.describe(timeout_s=60.0, give_up=never)
    answer = client.predict(plan_of(1, rows=5), timeout_s=30.0)
    client.close()
    assert [group.rows for group in answer.groups] == [5]


def test_a_worker_that_does_not_answer_is_looked_for_over_new_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One channel looks for a name that is not there at ever longer intervals."""
    monkeypatch.setattr(worker_client, "REPORT_S", 0.05)
    opened: list[str] = []
    real = grpc.insecure_channel

    def noted(target: str, **more: Any) -> grpc.Channel:
        opened.append(target)
        return real(target, **more)

    monkeypatch.setattr(grpc, "insecure_channel", noted)
    client = WorkerClient("unix:/nowhere/worker.sock")
    with pytest.raises(WorkerUnreachable, match="enough"):
        client.describe(timeout_s=60.0, give_up=lambda: "enough" if len(opened) > 2 else None)
    client.close()


def test_a_worker_without_its_step_socket_is_lost(fake_worker: StartWorker) -> None:
    client = WorkerClient(fake_worker())
    client.describe(timeout_s=60.0, give_up=never)
    path = Path(step_socket(client.address.removeprefix("unix:")))
    path.unlink()
    losses: queue.SimpleQueue[str] = queue.SimpleQueue()
    client.open(on_result=lambda result: None, on_lost=losses.put)
    assert f"no plans can be sent to it: {path}: [Errno 2]" in losses.get(timeout=30.0)
    client.close()
    assert losses.empty()
