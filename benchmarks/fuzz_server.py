"""`make fuzz`: bad requests and raw bytes at a real server; each gets a proper status.

Ends with one line of JSON: requests, internal_errors, engine_deaths, wrong_answers, leaked_pages.
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
from fuzz_inputs import Method, methods, mutated, random_message
from rich.progress import Progress

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.bench.server_process import RunningServer, running_server
from stemserve.service.client import Client, ClientError

CALL_S = 20.0
AT_ONCE = 8
GOOD_EVERY = 100
BAD_CODES = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
MAX_OWNERS = 20  # registrations of one prefix that are released at the end
ROWS = 300  # of a step: more would make each good request slow to start


class Fuzzer:
    def __init__(self, server: RunningServer, client: Client, channel: Any, seed: int) -> None:
        self._server = server
        self._client = client
        self._channel = channel
        self._rng = random.Random(seed)
        self._methods = methods()
        self.codes: Counter[str] = Counter()
        self.faults: list[str] = []
        self.wrong_answers = 0

    async def run(self, requests: int, progress: Progress) -> None:
        task = progress.add_task("bad requests", total=requests)
        expected = await self._good()
        sent = 0
        while sent < requests:
            batch = min(AT_ONCE, requests - sent)
            await asyncio.gather(*(self._send() for _ in range(batch)))
            await self._raw_bytes()
            if sent // GOOD_EVERY != (sent + batch) // GOOD_EVERY:
                self.wrong_answers += await self._good() != expected
            sent += batch
            progress.update(task, completed=sent)

    async def _good(self) -> list[float]:
        """A request that must be answered, whatever was sent before."""
        scores = await self._client.score(
            [" Paris", " Rome"],
            inference_pb2.LogLikelihood(),
            query="The capital of France is",
        )
        return [round(float(value), 4) for value in scores.scores.ravel()]

    async def _send(self) -> None:
        method = self._rng.choice(self._methods)
        message = random_message(method.request, self._rng)
        _bound(message)
        blob = message.SerializeToString()
        if self._rng.random() < 0.5:
            blob = mutated(blob, self._rng)
        if self._rng.random() < 0.05:
            blob = self._rng.randbytes(self._rng.randrange(300))
        try:
            async with asyncio.timeout(CALL_S + 5):
                await self._call(method, blob)
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code in BAD_CODES:
                self.faults.append(f"{method.name} {blob[:80]!r}: {code.name} {error.details()}")
        except TimeoutError:
            code = grpc.StatusCode.UNKNOWN
            self.faults.append(f"{method.name} {blob[:80]!r}: no answer")
        self.codes[code.name] += 1

    async def _call(self, method: Method, blob: bytes) -> None:
        if method.streams_in:
            call = self._channel.stream_stream(method.name)(iter([blob]), timeout=CALL_S)
        elif method.streams_out:
            call = self._channel.unary_stream(method.name)(blob, timeout=CALL_S)
        else:
            await self._channel.unary_unary(method.name)(blob, timeout=CALL_S)
            return
        async for _ in call:
            pass

    async def _raw_bytes(self) -> None:
        """Bytes that are no HTTP/2, or the beginning of some."""
        host, port = self._server.address.rsplit(":", 1)
        start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if self._rng.random() < 0.5 else b""
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(start + self._rng.randbytes(self._rng.randrange(1, 400)))
            await writer.drain()
            async with asyncio.timeout(0.05):
                await reader.read(64)
            writer.close()
        except (OSError, TimeoutError):
            pass  # it may close the connection, or wait for more


def _bound(message: Any) -> None:
    """Long generations are not bad input, only slow."""
    for name in ("max_new_tokens", "min_new_tokens"):
        if name in message.DESCRIPTOR.fields_by_name and getattr(message, name) < 1 << 20:
            setattr(message, name, min(getattr(message, name), 8))
    if isinstance(message, prefixes_pb2.RegisterRequest):
        message.ttl_seconds = min(message.ttl_seconds, 5.0)


async def fuzz(server: RunningServer, requests: int, seed: int) -> dict[str, Any]:
    started = time.monotonic()
    options = [("grpc.max_receive_message_length", 64 << 20)]
    with Progress(transient=True, disable=not sys.stderr.isatty()) as progress:
        async with (
            Client(server.address, timeout_s=CALL_S) as client,
            grpc.aio.insecure_channel(server.address, options) as channel,
        ):
            fuzzer = Fuzzer(server, client, channel, seed)
            try:
                await fuzzer.run(requests, progress)
            except ClientError as error:
                fuzzer.faults.append(f"a good request failed: {error}")
            for prefix in await client.list_prefixes():
                for _ in range(MAX_OWNERS):
                    with suppress(ClientError):
                        await client.release_prefix(prefix.prefix_id)
            load = await client.load()
    for fault in fuzzer.faults[:20]:
        print(fault, file=sys.stderr)
    return {
        "requests": sum(fuzzer.codes.values()),
        "internal_errors": len(fuzzer.faults),
        "engine_deaths": int(server.metric("worker_restarts_total")),
        "wrong_answers": fuzzer.wrong_answers,
        "leaked_pages": load.used_pages,
        "codes": dict(sorted(fuzzer.codes.items())),
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2_500, metavar="N")
    parser.add_argument("--seed", type=int, default=None, help="of the requests; else a new one")
    parser.add_argument("--model", required=True, help="a .gguf file or a Hugging Face folder")
    arguments = parser.parse_args()
    seed = random.randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        options = ["--model", arguments.model, "--max-step-tokens", str(ROWS)]
        with running_server(options, log=log) as server:
            result = asyncio.run(fuzz(server, arguments.requests, seed))
        if result["internal_errors"]:
            print(log.read_text()[-3000:], file=sys.stderr)
    print(json.dumps(result))
    failures = ("internal_errors", "engine_deaths", "wrong_answers", "leaked_pages")
    return int(any(result[key] for key in failures))


if __name__ == "__main__":
    sys.exit(main())
