"""Times of tree decode: CUDA-graph replays of each engine in turn, and of the host's planning."""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from codec_engines import Call, Engine
from codec_trees import PAGE_TOKENS, Case, make_kv, reference

from stemserve.kernels.codec_decode import CodecDecode, DecodeNumbers

WARM, REPLAYS, CALLS = 3, 20, 8


def graph_of(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    for _ in range(WARM):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, count: int) -> float:
    make_event: Any = torch.cuda.Event
    events = [[make_event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    graph.replay()
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times_ms: list[float] = [begin.elapsed_time(end) for begin, end in events]
    return statistics.median(times_ms) * 1e3


def measure(case: Case, engines: dict[str, Engine], rounds: int) -> dict[str, Any]:
    set_mb = (
        4e-6 * len(case.layout.node_pages) * PAGE_TOKENS * case.shape.kv_heads * case.shape.head_dim
    )
    sets = [
        make_kv(case, torch.float16) for _ in range(max(2, min(CALLS, math.ceil(400 / set_mb))))
    ]
    q = torch.randn(
        (len(case.leaves), case.shape.query_heads, case.shape.head_dim), device="cuda"
    ).half()
    exact = reference(case, q, sets[0])
    row: dict[str, Any] = {"tree": case.name, "rows": len(q), "floor_us": case.floor_us}
    graphs: dict[str, list[torch.cuda.CUDAGraph]] = {}
    keep: list[Call] = []  # a graph does not hold what it reads
    for name, make in engines.items():
        try:
            call = make(case, q)
            error = (call(sets[0]).double() - exact).norm() / exact.norm()
            row[name] = {"error": float(error)}
            one = graph_of([partial(call, sets[0])])
            many = graph_of([partial(call, sets[i % len(sets)]) for i in range(CALLS)])
            graphs[name] = [one, many]
            keep.append(call)
        except Exception as error:  # a peer that cannot run a tree is listed with its reason
            row[name] = {"failed": repr(error)[:300]}
    times: dict[str, list[list[float]]] = {name: [[], []] for name in graphs}
    for _ in range(rounds):  # in turns: the clock falls under the power cap
        for name, (one, many) in graphs.items():
            times[name][0].append(replay_us(one, REPLAYS))
            times[name][1].append(replay_us(many, 5) / CALLS)
    for name, (replays, cold) in times.items():
        row[name] |= {"replay_us": statistics.median(replays), "cold_us": statistics.median(cold)}
    return row


def plan_ms(case: Case) -> float:
    decode = CodecDecode(case.shape, torch.device("cuda"), DecodeNumbers(dtype=torch.float16))
    plan = decode.plan(case.layout)
    times_s: list[float] = []
    for _ in range(30):
        start = time.perf_counter()
        decode.replan(plan, case.layout)
        times_s.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return statistics.median(times_s) * 1e3
