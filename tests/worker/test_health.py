"""Health of a worker alone: ready once it serves, alive while its steps end."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.config import ConfigError, parse_config
from stemserve.worker.health import WorkerHealth, health_port
from stemserve.worker.stall_clock import StallClock
from stemserve.worker.step_thread import StepThread
from stemserve.worker.steps.step import Step


@dataclass
class Time:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, kw_only=True)
class Rig:
    time: Time
    clock: StallClock
    health: WorkerHealth
    stub: Any  # HealthStub

    def status(self, service: str) -> str:
        found = self.stub.Check(HealthCheckRequest(service=service), timeout=60)
        return str(HealthCheckResponse.ServingStatus.Name(found.status))


@pytest.fixture
def rig() -> Iterator[Rig]:
    time = Time()
    clock = StallClock(time)
    health = WorkerHealth(clock.longest_s, step_timeout_s=30.0)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[health.handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Rig(time=time, clock=clock, health=health, stub=HealthStub(channel))
    server.stop(None).wait()


@pytest.mark.parametrize("service", ["", "stemserve.v1.Worker"])
def test_a_worker_is_ready_while_it_serves_and_alive_before(rig: Rig, service: str) -> None:
    assert rig.status(service) == "NOT_SERVING" and rig.status("liveness") == "SERVING"
    rig.health.set_serving(True)
    assert rig.status(service) == "SERVING"
    rig.health.set_serving(False)
    assert rig.status(service) == "NOT_SERVING"


def test_other_names_are_not_found(rig: Rig) -> None:
    with pytest.raises(grpc.RpcError, match="known services: '', 'stemserve.v1.Worker'"):
        rig.status("stemserve.v1.Inference")


@dataclass(frozen=True)
class Launched:
    step_id: int

    def result(self) -> worker_pb2.StepResult:
        return worker_pb2.StepResult(step_id=self.step_id)


@dataclass
class HungRunner:
    """Its steps end when told to."""

    uses_gpu: bool
    started: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)
    num_classes: int = 0

    def decode(self, plan: worker_pb2.StepPlan) -> Step:
        raise AssertionError("no step is divided")

    def launch(self, plan: worker_pb2.StepPlan) -> Launched:
        self.started.set()
        self.goes_on.wait()
        return Launched(plan.step_id)


def test_a_step_that_does_not_end_makes_a_worker_not_alive(rig: Rig) -> None:
    runner, done = HungRunner(uses_gpu=False), threading.Event()
    with StepThread(runner, lambda: None, clock=rig.clock) as steps:
        try:
            steps.submit(worker_pb2.StepPlan(), lambda _: None, lambda: True)
            assert runner.started.wait(60)
            rig.time.now_s += 30.0
            assert rig.status("liveness") == "SERVING"
            rig.time.now_s += 0.1
            assert rig.status("liveness") == "NOT_SERVING"
        finally:
            runner.goes_on.set()
        steps.after_all(done.set)
        assert done.wait(60)
        assert rig.status("liveness") == "SERVING"


def test_the_oldest_of_several_steps_counts() -> None:
    time = Time()
    clock = StallClock(time)
    assert clock.longest_s() == 0
    with clock.running():
        time.now_s += 2
        with clock.running():
            time.now_s += 1
            assert clock.longest_s() == 3
        assert clock.longest_s() == 3
    assert clock.longest_s() == 0


def test_an_address_in_use_is_an_error_that_names_the_flag(rig: Rig) -> None:
    first = grpc.server(ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
    port = first.add_insecure_port("127.0.0.1:0")
    first.start()
    with (
        pytest.raises(ConfigError, match=f"--health-listen 127.0.0.1:{port}: cannot bind"),
        health_port(f"127.0.0.1:{port}", rig.health),
    ):
        pass
    first.stop(None).wait()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ["--health-listen", "unix:/tmp/h.sock"],
            "--health-listen 'unix:/tmp/h.sock' is not host:",
        ),
        (["--health-listen", "50052"], "--health-listen '50052' is not host:port"),
    ],
)
def test_an_address_that_no_probe_reaches_is_refused(
    flags: list[str], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        parse_config(["--model", str(tmp_path), "--listen", "127.0.0.1:1", *flags])


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan", "soon"])
def test_a_step_timeout_that_is_none_is_refused(
    seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(tmp_path), "--listen", "127.0.0.1:1", f"--step-timeout={seconds}"]
    with pytest.raises(SystemExit):
        parse_config(words)
    assert "number of seconds above 0" in capsys.readouterr().err
