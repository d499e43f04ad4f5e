"""Pictures of the dashboards over a real server under mixed load: `make dashboard-pictures`.

Starts a server with a small random model and a Prometheus, calls for some minutes (quiet, busy,
more than it can take, a lost worker, quiet again) and draws what Prometheus then has.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import yaml
from draw_dashboards import Source, draw_all
from soak_traffic import Traffic, kinds

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.bench.models import ModelShape
from stemserve.service.bench.server_process import RunningServer, running_server
from stemserve.service.client import Client, ClientError, token_blob

ROOT = Path(__file__).parents[1]
RULES = ROOT / "deploy/prometheus/rules.yaml"
MODEL = ModelShape(
    name="small", layers=4, hidden=128, query_heads=4, kv_heads=2, intermediate=256, head_dim=32,
    vocab=2_000,
)  # fmt: skip
KV_PAGES = 450  # fewer than all prefixes take
SCRAPE_S = 5
PORT = 19_090
PAUSE_S = 0.15  # of a caller, after a call
SETTINGS = {"STEMSERVE__LIMITS__MAX_QUEUED_MS": "1500"}
# Callers at once, for such a share of the time.
PHASES = ((0.2, 3), (0.25, 8), (0.15, 48), (0.25, 6), (0.15, 8))
LOST_AFTER = 0.7  # of the time, the worker is killed


@contextmanager
def scraping(program: str, metrics_url: str, folder: Path) -> Iterator[str]:
    """The address of a Prometheus with the project's rules."""
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        group.pop("interval", None)
    (folder / "rules.yaml").write_text(json.dumps(rules))
    target = metrics_url.removeprefix("http://").removesuffix("/metrics")
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(folder / "rules.yaml")],
        "scrape_configs": [{"job_name": "stemserve", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yaml").write_text(json.dumps(config))
    command = [program, f"--config.file={folder / 'prometheus.yaml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{PORT}"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            address = f"http://127.0.0.1:{PORT}"
            _wait_ready(address, process)
            yield address
        finally:
            process.terminate()


def _wait_ready(address: str, process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        with suppress(URLError, ConnectionError), urlopen(f"{address}/-/ready", timeout=2):
            return
        time.sleep(0.2)
    raise RuntimeError("Prometheus did not start")


async def load(server: RunningServer, seconds: float) -> None:
    """Calls of every kind; what is refused or fails meanwhile is what the dashboards show."""
    traffic = Traffic.drawn(MODEL.vocab, seed=7)
    async with Client(server.address, timeout_s=20.0) as client:
        for prefix in traffic.prefixes[:3]:
            await client.register(prefixes_pb2.RegisterRequest(tokens=token_blob(prefix)))
        lost = asyncio.create_task(_lose_worker(server, seconds * LOST_AFTER))
        for share, callers in PHASES:
            end = time.monotonic() + share * seconds
            await asyncio.gather(*(_calls(client, traffic, end, n) for n in range(callers)))
        await lost


async def _lose_worker(server: RunningServer, seconds: float) -> None:
    await asyncio.sleep(seconds)
    for pid in server.worker_pids:
        os.kill(pid, signal.SIGKILL)


async def _calls(client: Client, traffic: Traffic, end: float, seed: int) -> None:
    rng = random.Random(seed)
    weights = kinds(traffic)
    while time.monotonic() < end:
        (kind,) = rng.choices(list(weights), weights=list(weights.values()))
        try:
            if rng.random() < 0.03:
                await client.score_request(inference_pb2.ScoreRequest(items=["a"]))  # refused
            await kind(client, rng)
        except ClientError as error:
            await asyncio.sleep(min(error.retry_after_s or 0.0, 1.0))
        await asyncio.sleep(rng.expovariate(1 / PAUSE_S))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default=".cache/prometheus/prometheus", help="program")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    seconds = options.minutes * 60
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["--model", str(MODEL.write(folder)), "--load-format", "dummy", "--threads", "1"]
        words += ["--kv-pages", str(KV_PAGES), "--max-queued-requests", "24"]
        with (
            running_server(words, log=folder / "server.log", settings=SETTINGS) as server,
            scraping(options.prometheus, server.metrics_url, folder) as address,
        ):
            asyncio.run(load(server, seconds))
            source = Source(
                address=address, end=time.time(), seconds=seconds, scrape_s=float(SCRAPE_S)
            )
            for picture, titles in draw_all(source, options.output).items():
                print(f"drew {picture}" + (f"; no data: {', '.join(titles)}" if titles else ""))


if __name__ == "__main__":
    main()
