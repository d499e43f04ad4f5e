"""A worker that listens on TCP, with and without TLS, and services that call it."""

import ipaddress
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from tests.service.certificates import Authority, Identity

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client
from stemserve.service.config.server import WorkerConfig
from stemserve.service.request import WorkerFacts
from stemserve.service.workers.remote_worker import RemoteWorker
from stemserve.service.workers.worker_client import WorkerClient, WorkerUnreachable

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
START_S = 60.0
REFUSED_S = 1.5
LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


@dataclass(frozen=True, kw_only=True)
class Papers:
    """Two authorities; each signed a worker and a service."""

    folder: Path
    ca: Path
    worker: Identity
    service: Identity
    other_ca: Path
    other_service: Identity


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    ours, others = Authority(folder, "ours"), Authority(folder, "others")
    return Papers(
        folder=folder,
        ca=ours.certificate,
        worker=ours.issue("worker", LOOPBACK),
        service=ours.issue("service"),
        other_ca=others.certificate,
        other_service=others.issue("stranger"),
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def worker_command(model: Path, listen: str, *options: object) -> list[str]:
    words = ["--listen", listen, "--model", model, "--load-format", "dummy", "--device", "cpu"]
    words += ["--threads", "1", "--kv-pages", "64", *options]
    return [sys.executable, "-m", "stemserve.worker", *map(str, words)]


@pytest.fixture(scope="module")
def guarded_worker(tiny_model: Path, papers: Papers) -> Iterator[str]:
    """The address of a worker that demands a certificate of its service."""
    address = f"127.0.0.1:{free_port()}"
    command = worker_command(
        tiny_model,
        address,
        *("--tls-certificate", papers.worker.certificate),
        *("--tls-private-key", papers.worker.private_key),
        *("--tls-client-ca", papers.ca),
    )
    with subprocess.Popen(command) as process:
        yield address
        process.kill()


def described(config: WorkerConfig, *, timeout_s: float = START_S) -> WorkerFacts:
    assert config.address is not None
    host = RemoteWorker(config.address, config)
    client = WorkerClient(host.address, host.credentials)
    try:
        return client.describe(timeout_s=timeout_s, give_up=host.ended)
    finally:
        client.close()


def config_of(address: str, ca: Path | None, service: Identity | None) -> WorkerConfig:
    return WorkerConfig(
        address=address,
        tls_ca=ca,
        tls_certificate=service.certificate if service else None,
        tls_private_key=service.private_key if service else None,
    )


def test_a_worker_answers_only_the_service_that_its_authority_signed(
    guarded_worker: str, papers: Papers
) -> None:
    assert described(config_of(guarded_worker, papers.ca, papers.service)).kv_pages == 64
    for ca, service in (
        (None, None),  # plaintext
        (papers.ca, None),
        (papers.ca, papers.other_service),
        (papers.other_ca, papers.service),  # the service believes others
    ):
        with pytest.raises(WorkerUnreachable, match="UNAVAILABLE"):
            described(config_of(guarded_worker, ca, service), timeout_s=REFUSED_S)


def test_new_certificates_are_used_from_the_next_connection_on(
    tiny_model: Path, papers: Papers, tmp_path: Path
) -> None:
    first, second = Authority(tmp_path, "first"), Authority(tmp_path, "second")
    identity = first.issue("worker", LOOPBACK)
    address = f"127.0.0.1:{free_port()}"
    files = ("--tls-certificate", identity.certificate, "--tls-private-key", identity.private_key)
    with subprocess.Popen(worker_command(tiny_model, address, *files)) as process:
        assert described(config_of(address, first.certificate, None))
        second.issue("worker", LOOPBACK)  # over the files of the first
        assert described(config_of(address, second.certificate, None))
        with pytest.raises(WorkerUnreachable):
            described(config_of(address, first.certificate, None), timeout_s=REFUSED_S)
        process.kill()


async def test_a_server_scores_with_a_worker_behind_mutual_tls(
    guarded_worker: str, papers: Papers, tiny_model: Path, start_server: StartServer
) -> None:
    config = papers.folder / "stemserve.toml"
    config.write_text(
        f'[worker]\naddress = "{guarded_worker}"\ntls_ca = "{papers.ca}"\n'
        f'tls_certificate = "{papers.service.certificate}"\n'
        f'tls_private_key = "{papers.service.private_key}"\n'
    )
    _, ports = start_server("--model", tiny_model, "--load-format", "dummy", "--config", config)
    async with Client(f"127.0.0.1:{ports['rpc']}") as client:
        result = await client.score(["ab", "cd"], inference_pb2.LogLikelihood(), query="q")
    assert len(result.scores) == 2


@pytest.mark.parametrize("guarded", [False, True])
def test_a_worker_that_listens_to_the_network_says_who_may_call(
    tiny_model: Path, papers: Papers, tmp_path: Path, guarded: bool
) -> None:
    address = f"0.0.0.0:{free_port()}"
    files = (
        *("--tls-certificate", papers.worker.certificate),
        *("--tls-private-key", papers.worker.private_key),
    )
    log = tmp_path / "log"
    command = worker_command(tiny_model, address, *(files if guarded else ()))
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        until = time.monotonic() + START_S
        while "serving on" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.05)
        process.kill()
    said = "takes any service" if guarded else "is open to the network: no TLS"
    assert f"{address} {said}" in log.read_text()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--tls-client-ca", "ca.pem"), "TLS needs both --tls-certificate and --tls-private-key"),
        (("--tls-certificate", "a", "--tls-private-key", "b"), "is for --listen HOST:PORT"),
    ],
)
def test_half_of_tls_is_refused(
    tiny_model: Path, tmp_path: Path, options: tuple[str, ...], problem: str
) -> None:
    command = worker_command(tiny_model, f"unix:{tmp_path}/w.sock", *options)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert ended.returncode == 2
    assert problem in ended.stderr
