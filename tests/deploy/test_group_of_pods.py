"""Leader and worker of a LeaderWorkerSet, started with the words and files that the chart makes."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.deploy.chart import MATRIX, ROOT, render, templates, the
from tests.deploy.pod_rig import Names, Outside, Pod, place
from tests.deploy.test_live_prometheus import free_port
from tests.e2e.conftest import start_server, stemserve_command
from tests.service.certificates import Authority

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.client import Client
from stemserve.service.config.server import WorkerConfig
from stemserve.service.config.sources import Setting, read_settings
from stemserve.service.workers.remote_worker import RemoteWorker
from stemserve.service.workers.worker_client import WorkerClient, WorkerUnreachable

__all__ = ["start_server", "stemserve_command"]
GROUP = "x-stemserve-group"
LEADER = f"{GROUP}-0"
WORKER = f"{GROUP}-0-1.{GROUP}.ns.svc:50061"
PATIENCE_S = 120.0
REFUSED_S = 1.5


@dataclass
class Group:
    leader: Pod
    worker: Pod
    names: Names
    health_port: int
    command: Callable[..., list[str]]
    authority: Authority
    process: "subprocess.Popen[str] | None" = None

    def start_worker(self) -> None:
        # The last of two equal flags counts: the machine's ports need not be free.
        words = [*self.worker.words, f"--listen=127.0.0.1:{self.names.known[WORKER]}"]
        words += [f"--health-listen=127.0.0.1:{self.health_port}"]
        self.process = subprocess.Popen(self.command(*words), text=True)

    def kill_worker(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def certify(self, secret: Path, *subjects: str) -> None:
        """Puts a certificate for these names into a folder, as a Secret of them has it."""
        names = [x509.DNSName(subject) for subject in subjects]
        identity = self.authority.issue("pod", *names)
        secret.mkdir(exist_ok=True)
        shutil.copy(identity.certificate, secret / "tls.crt")
        shutil.copy(identity.private_key, secret / "tls.key")
        shutil.copy(self.authority.certificate, secret / "ca.crt")

    def worker_config(self) -> WorkerConfig:
        """What the leader has read."""
        file = Path(self.leader.words[self.leader.words.index("--config") + 1])
        address = Setting(value=self.leader.words[-1], source="--worker")
        settings = read_settings(file=file, environment={}, flags={"worker.address": address})
        return settings.config.worker


@pytest.fixture(scope="module")
def group(
    stemserve_command: Callable[..., list[str]],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Group]:
    folder = tmp_path_factory.mktemp("group")
    objects = render(MATRIX["groups"])
    names = Names({WORKER: free_port()})
    blank = Pod(folder=folder, words=[])
    group = Group(
        leader=blank,
        worker=blank,
        names=names,
        health_port=free_port(),
        command=stemserve_command,
        authority=Authority(folder),
    )
    group.certify(folder / "front")
    group.certify(folder / "back", f"*.{GROUP}.ns.svc")  # as docs/deploy.md says
    weights = folder / "weights"
    shutil.copytree(tiny_model, weights / "m")
    outside = Outside(
        objects=objects,
        secrets={"front": folder / "front", "back": folder / "back"},
        claims={"weights": weights},
    )
    found = templates(objects)
    group.leader = place(LEADER, found[GROUP], outside, folder / "leader")
    group.worker = place(f"{LEADER}-1", found[f"{GROUP}-worker"], outside, folder / "worker")
    with names.answering():
        yield group
        if group.process is not None:
            group.kill_worker()


@pytest.fixture(scope="module")
def ports(
    group: Group, start_server: Callable[..., tuple[object, dict[str, int]]]
) -> dict[str, int]:
    """Of the leader, once both serve: rpc, health and metrics."""
    group.start_worker()
    assert group.leader.words[0] == "serve"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("grpc_proxy", group.names.url)
        _, ports = start_server(*group.leader.words[1:])
    return ports


def health(port: int, service: str) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = HealthStub(channel)
        try:
            found = stub.Check(HealthCheckRequest(service=service), timeout=10)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return error.code().name
    return str(HealthCheckResponse.ServingStatus.Name(found.status))


def wait_for(port: int, service: str, status: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while health(port, service) != status:
        assert time.monotonic() < until, f"{service} does not become {status}"
        time.sleep(0.05)


async def scores(port: int, prefix: str) -> list[float]:
    async with Client(f"127.0.0.1:{port}") as client:
        found = await client.score(
            ["ab", "cd"], inference_pb2.LogLikelihood(), contexts=[prefix_context(prefix)]
        )
    return [float(score) for score in found.scores]


def prefix_context(prefix: str) -> inference_pb2.Context:
    return inference_pb2.Context(prefix_id=prefix, text="q")


async def test_the_pair_scores_and_a_new_worker_takes_the_place_of_a_killed_one(
    group: Group, ports: dict[str, int]
) -> None:
    async with Client(f"127.0.0.1:{ports['rpc']}") as client:
        await client.register(prefixes_pb2.RegisterRequest(prefix_id="p", text="a prefix"))
    before = await scores(ports["rpc"], "p")
    assert group.names.asked == {WORKER}
    group.kill_worker()
    wait_for(ports["health"], "stemserve.v1.Inference", "NOT_SERVING")
    assert health(ports["health"], "liveness") == "SERVING"
    group.start_worker()
    wait_for(ports["health"], "stemserve.v1.Inference", "SERVING")
    assert await scores(ports["rpc"], "p") == before  # the leader still knows the prefix


def test_probes_of_the_worker_are_answered(group: Group, ports: dict[str, int]) -> None:
    for service in ("", "stemserve.v1.Worker", "liveness"):
        wait_for(group.health_port, service, "SERVING")
    assert health(group.health_port, "stemserve.v1.Inference") == "NOT_FOUND"


def test_the_leader_takes_no_worker_of_another_name(
    group: Group, ports: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("grpc_proxy", group.names.url)
    config = group.worker_config()
    assert config.address == WORKER
    mounted = group.worker.folder / "worker-tls"  # where a changed Secret shows

    def describe(timeout_s: float) -> int:
        host = RemoteWorker(WORKER, config)
        client = WorkerClient(host.address, host.credentials)
        try:
            return client.describe(timeout_s=timeout_s, give_up=host.ended).kv_pages
        finally:
            client.close()

    group.certify(mounted, "*.another-group.ns.svc", "localhost")
    with pytest.raises(WorkerUnreachable):
        describe(REFUSED_S)
    group.certify(mounted, f"*.{GROUP}.ns.svc")
    assert describe(PATIENCE_S) == 64


def test_helm_test_asks_for_health_and_metrics(ports: dict[str, int]) -> None:
    test = the(render(MATRIX["groups"]), "Pod", "x-stemserve-test")
    commands = [part["command"] for part in test["spec"]["containers"] if "command" in part]
    servers = "x-stemserve-servers.ns.svc"

    def run(command: list[str], ports: dict[str, int]) -> int:
        here = {f"{servers}:50052": ports["health"], f"{servers}:9400": ports["metrics"]}
        words = [word.replace("/opt/stemserve", str(ROOT / "deploy")) for word in command]
        for name, port in here.items():
            words = [word.replace(name, f"127.0.0.1:{port}") for word in words]
        assert words[0] == "python" and servers not in str(words)
        return subprocess.run([sys.executable, *words[1:]], capture_output=True).returncode

    wait_for(ports["health"], "stemserve.v1.Inference", "SERVING")
    assert [run(command, ports) for command in commands] == [0, 0]
    nobody = {"health": free_port(), "metrics": ports["health"]}
    assert all(run(command, nobody) for command in commands)
