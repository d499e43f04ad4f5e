"""A server whose KV cache is float8."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stemserve.proto.v1.inference_pb2 import Context, LogLikelihood
from stemserve.service.client import Client
from stemserve.service.request import Float32

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]


async def test_a_float8_cache_is_told_of_and_gives_nearly_the_same_scores(
    start_server: StartServer, tiny_model: Path
) -> None:
    options: list[object] = ["--model", tiny_model, "--load-format", "dummy", "--threads", 1]
    options += ["--kv-pages", 100, "--max-step-tokens", 64]
    items = [f"item {number}" for number in range(30)]
    scores: list[Float32] = []
    kinds: list[str] = []
    for kept in ("auto", "fp8_e4m3"):
        _, ports = start_server(*options, "--kv-cache-dtype", kept)
        async with Client(f"127.0.0.1:{ports['rpc']}") as client:
            kinds.append((await client.model()).kv_dtype)
            contexts = [Context(text="A context of some words. " * 8)]
            calls = [
                await client.score(items, LogLikelihood(), contexts=contexts) for _ in range(2)
            ]
        assert calls[1].usage.cached_tokens >= 192
        np.testing.assert_allclose(calls[0].scores, calls[1].scores, atol=1e-3)
        scores.append(calls[0].scores)
    assert kinds == ["float32", "float8_e4m3fn"]
    lost = np.abs(scores[0] - scores[1])
    assert 0 < lost.max() < 0.5
