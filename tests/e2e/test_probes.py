"""An idle server finds out what its choices of attention cost."""

import asyncio
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.served import scrape

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import Client

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
PATIENCE_S = 30.0


async def test_probes_of_an_idle_worker_reach_the_metrics(
    start_server: StartServer, tiny_model: Path
) -> None:
    words: list[object] = ["--model", tiny_model, "--load-format", "dummy", "--threads", 1]
    _, ports = start_server(*words, "--kv-pages", 100, "--kernel-probe-rate", 1)
    request = inference_pb2.ScoreRequest(query="a context", items=["one", "another"])
    request.log_likelihood.SetInParent()
    async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=60.0) as client:
        before = await client.score_request(request)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                await asyncio.sleep(0.2)  # idle
                after = await client.score_request(request)  # tells of the probe before it
                metrics = await scrape(ports)
                probes = [v for name, v in metrics.items() if "kernel_probes_total" in name]
                if sum(probes) >= 2:
                    break
    assert after.scores == pytest.approx(before.scores, abs=1e-4)
    assert metrics['stemserve_kernel_probed_seconds_total{op="prefill"}'] > 0
    probed = metrics['stemserve_kernel_probe_ratio_count{op="prefill"}']
    assert probed == sum(probes)
