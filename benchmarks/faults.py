"""`make faults`: workers and clients that die, hang and leave while a real server is under load.

Ends with one line of JSON: faults, wrong_answers, leaked_pages, stuck_calls, worst_recovery_s
(seconds from the moment that the server noticed that its worker was gone to the next right answer).
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from fault_kinds import FAULTS, OF_WORKERS, Fault
from known_answers import KnownAnswers
from rich.progress import Progress

from stemserve.service.bench.server_process import RunningServer, running_server
from stemserve.service.client import Client, ClientError

CALLERS = 4
CALL_S = 30.0
STUCK_S = 10.0  # past its deadline
IDLE_S = 30.0
NOTICE_S = 60.0
MOST_RECOVERY_S = 10.0
SETTINGS = {"STEMSERVE__WORKER__STEP_TIMEOUT_LEAST_S": "2"}
EXPECTED_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class Load:
    """Callers who ask questions with known answers, one after another."""

    def __init__(self, server: RunningServer, known: KnownAnswers, seed: int) -> None:
        self._server = server
        self._known = known
        self._rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stuck = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as callers:
            for _ in range(CALLERS):
                callers.create_task(self._ask_for_ever())

    async def _ask_for_ever(self) -> None:
        async with Client(self._server.address, timeout_s=CALL_S) as client:
            while True:
                await self.ask(client)

    async def ask(self, client: Client) -> bool:
        """Whether the answer came and was right."""
        try:
            async with asyncio.timeout(CALL_S + STUCK_S):
                right = await self._known.check(client, self._rng)
        except TimeoutError:
            self.stuck += 1
            return False
        except ClientError as error:
            self.outcomes[error.code.name] += 1
            if error.code not in EXPECTED_CODES:
                self.wrong.append(f"{error}")
            await asyncio.sleep(0.02)
            return False
        self.outcomes["right" if right else "wrong"] += 1
        if not right:
            self.wrong.append("an answer differs")
        return right


async def recovered(server: RunningServer, load: Load) -> float:
    """Seconds from the moment that the loss was noticed to the next right answer."""
    noticed = await _noticed(server)
    async with Client(server.address, timeout_s=CALL_S) as client:
        while not await load.ask(client):
            await asyncio.sleep(0.02)
    return time.monotonic() - noticed


async def _noticed(server: RunningServer) -> float:
    end = time.monotonic() + NOTICE_S
    while await asyncio.to_thread(server.metric, "worker_up"):
        if time.monotonic() > end:
            raise RuntimeError(f"a dead worker was not noticed in {NOTICE_S:g} s")
        await asyncio.sleep(0.02)
    return time.monotonic()


async def leaked_pages(client: Client) -> int:
    """Pages that are in use once nothing runs."""
    end = time.monotonic() + IDLE_S
    while True:
        with suppress(ClientError):
            load = await client.load()
            # The last step of a cancelled call holds its pages until it is answered.
            busy = load.running_requests + load.queued_requests + load.used_pages
            if not busy or time.monotonic() > end:
                return load.used_pages
        await asyncio.sleep(0.1)


async def run(server: RunningServer, count: int, seed: int) -> dict[str, Any]:
    rng, started = random.Random(seed), time.monotonic()
    recoveries: list[float] = []
    done: Counter[str] = Counter()
    async with Client(server.address, timeout_s=CALL_S) as client:
        load = Load(server, await KnownAnswers.find_out(client), seed)
        loading = asyncio.create_task(load.run())
        with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("faults", total=count)
            for _ in range(count):
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                fault: Fault = rng.choices(list(FAULTS), weights=list(FAULTS.values()))[0]
                await fault(server, rng)
                done[fault.__name__] += 1
                if fault in OF_WORKERS:
                    recoveries.append(await recovered(server, load))
                progress.update(task, advance=1)
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        leaked = await leaked_pages(client)
    for problem in load.wrong[:20]:
        print(problem, file=sys.stderr)
    return {
        "faults": sum(done.values()),
        "wrong_answers": len(load.wrong),
        "leaked_pages": leaked,
        "stuck_calls": load.stuck,
        "worst_recovery_s": round(max(recoveries, default=0.0), 2),
        "kinds": dict(done),
        "outcomes": dict(load.outcomes),
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=None, help="of the faults; else a new one")
    parser.add_argument("--model", required=True, help="a .gguf file or a Hugging Face folder")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with running_server(["--model", arguments.model], log=log, settings=SETTINGS) as server:
            try:
                result = asyncio.run(run(server, arguments.faults, seed))
            except Exception:
                print(log.read_text()[-3000:], file=sys.stderr)
                raise
    print(json.dumps(result))
    slow = result["worst_recovery_s"] > MOST_RECOVERY_S
    failures = ("wrong_answers", "leaked_pages", "stuck_calls")
    return int(slow or any(result[key] for key in failures))


if __name__ == "__main__":
    sys.exit(main())
