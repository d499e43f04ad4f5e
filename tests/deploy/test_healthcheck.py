"""The images' health check, against a health service."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse
from tests.deploy.chart import ROOT

SERVICE = "stemserve.v1.Inference"


def check(address: str) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, ROOT / "deploy" / "healthcheck.py", address]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("host", ["", "localhost:"])
@pytest.mark.parametrize("status", ["SERVING", "NOT_SERVING"])
def test_the_check_fails_unless_calls_are_taken(status: str, host: str) -> None:
    servicer = health.HealthServicer()
    servicer.set(SERVICE, HealthCheckResponse.ServingStatus.Value(status))
    server = grpc.server(ThreadPoolExecutor(2))
    generated: Any = health_pb2_grpc
    generated.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        done = check(f"{host}{port}")
    finally:
        server.stop(None).wait()
    assert done.returncode == (0 if status == "SERVING" else 1)
    assert done.stderr.strip() == ("" if status == "SERVING" else status)
    assert check(f"{host}{port}").returncode == 1  # nobody listens
