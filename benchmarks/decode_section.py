"""Measure engines on one tree: outputs checked, then timed in turns, with warm and cold caches."""

import math
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from decode_engines import Call, CannotRun, Engine
from kernel_clock import eager_us, graph_of, host_ms, replay_us
from kernel_trees import Case, make_kv, reference, repaged

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.codec.decode import CodecDecode
from stemserve.kernels.strategy import Strategy

WRONG = 3e-3  # relative to the norm of the exact result; fp16 rounding costs 3e-4
FAR = 3.0  # times the best
CALLS = 8  # of a cold graph, each on the next KV set
COLD_BYTES = 400 << 20  # of all KV sets, some L2 caches

Row = dict[str, Any]


@dataclass(kw_only=True)
class Sets:
    """Several KV sets of a case, also in the pages that an engine needs."""

    case: Case
    originals: list[LayerKV]

    def __post_init__(self) -> None:
        self._repaged: dict[int | None, tuple[Case, list[LayerKV]]] = {
            None: (self.case, self.originals)
        }

    def of(self, page_tokens: int | None) -> tuple[Case, list[LayerKV]]:
        if page_tokens not in self._repaged:
            assert page_tokens is not None
            other = repaged(self.case, page_tokens)
            kvs = [other.kv(kv) for kv in self.originals]
            self._repaged[page_tokens] = (other.case, kvs)
        return self._repaged[page_tokens]


def kv_sets(case: Case) -> Sets:
    shape, layout = case.shape, case.layout
    slots = max(1, len(layout.node_pages)) * layout.page_size
    size = 4 * slots * shape.kv_heads * shape.head_dim
    count = max(2, min(CALLS, math.ceil(COLD_BYTES / size)))
    return Sets(case=case, originals=[make_kv(case, torch.float16) for _ in range(count)])


@dataclass(kw_only=True)
class Prepared:
    """An engine's captured calls; a graph does not hold what it reads, so this does."""

    call: Call
    one: torch.cuda.CUDAGraph | None
    many: torch.cuda.CUDAGraph | None
    eager: partial[torch.Tensor]


def measure(case: Case, engines: list[Engine], rounds: int) -> Row:
    """Every engine's error and times; one that fails or is wrong is not timed."""
    sets = kv_sets(case)
    q = torch.randn(
        (len(case.leaves), case.shape.query_heads, case.shape.head_dim), device="cuda"
    ).half()
    exact = reference(case, q, sets.originals[0])
    row: Row = {
        "tree": case.name,
        "heads": [case.shape.query_heads, case.shape.kv_heads, case.shape.head_dim],
        "requests": len(q),
        "tokens": case.tokens,
        "share": round(case.share, 2),
        "floor_us": round(case.floor_us, 3),
        "engines": {},
    }
    ready: dict[str, Prepared] = {}
    for engine in engines:
        found, prepared = _prepare(engine, sets, q, exact)
        row["engines"][engine.name] = found
        if prepared is not None:
            ready[engine.name] = prepared
    for name, times in _in_turns(ready, rounds).items():
        row["engines"][name] |= times
    return row


def _prepare(
    engine: Engine, sets: Sets, q: torch.Tensor, exact: torch.Tensor
) -> tuple[Row, Prepared | None]:
    try:
        case, kvs = sets.of(engine.pages(sets.case))
        call = engine.prepare(case, q)
        error = float((call(kvs[0]).double() - exact).norm() / exact.norm())
        if not error < WRONG:
            return {"error": error, "wrong": True}, None
        return {"error": float(f"{error:.3g}")}, _captured(call, kvs)
    except CannotRun as reason:
        return {"cannot": str(reason)}, None
    except Exception as reason:  # a peer that fails is listed with its reason
        torch.cuda.synchronize()
        return {"failed": repr(reason)[:300]}, None


def _captured(call: Call, kvs: list[LayerKV]) -> Prepared:
    eager = partial(call, kvs[0])
    try:
        one = graph_of([eager])
        many = graph_of([partial(call, kvs[i % len(kvs)]) for i in range(CALLS)], warm_calls=0)
    except RuntimeError:  # it synchronizes or allocates on the host: no graph
        torch.cuda.synchronize()
        return Prepared(call=call, one=None, many=None, eager=eager)
    return Prepared(call=call, one=one, many=many, eager=eager)


def _in_turns(ready: dict[str, Prepared], rounds: int) -> dict[str, Row]:
    """In turns, for the clock falls under load; medians of the rounds.

    What is far from the best after one round has been measured well enough.
    """
    warm: dict[str, list[float]] = {name: [] for name in ready}
    cold: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    for turn in range(rounds):
        for name in names:
            prepared = ready[name]
            if prepared.one is None or prepared.many is None:
                warm[name].append(eager_us(prepared.eager))
            else:
                warm[name].append(replay_us(prepared.one))
                cold[name].append(replay_us(prepared.many, CALLS) / CALLS)
        if turn == 0 and names:
            best = min(times[0] for times in warm.values())
            names = [name for name in names if warm[name][0] <= FAR * best]
    return {name: _times(warm[name], cold[name]) for name in ready}


def _times(warm: list[float], cold: list[float]) -> Row:
    if not cold:
        return {"us": round(statistics.median(warm), 2), "graph": False}
    return {
        "us": round(statistics.median(warm), 2),
        "cold_us": round(statistics.median(cold), 2),
        "graph": True,
    }


def plan_times(case: Case, codec: Strategy) -> Row:
    """Host milliseconds of a first plan, of a step's plan into the same buffers, and of leaves that
    grew inside their last pages."""
    plan = codec.plan(case.layout)
    first = host_ms(partial(codec.plan, case.layout), 10)
    times: Row = {"first_plan_ms": first, "plan_ms": first}
    if isinstance(codec, CodecDecode):
        times["plan_ms"] = host_ms(partial(codec.replan, plan, case.layout))
        times["grow_ms"] = host_ms(partial(codec.grow, plan, case.layout))
    return {name: round(value, 4) for name, value in times.items()}
