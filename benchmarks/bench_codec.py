"""Tree decode against its floor and its peers, on one GPU.

    python benchmarks/bench_codec.py [--peers] [--trees trees.json] [--out results.json]

Without --trees: the eleven trees of the first table. Each number is the median of CUDA-graph
replays, engines taking turns. `replay`: one call a graph, warm L2. `cold`: a call inside a graph
that walks over several KV sets, as a model's layers do. Every engine reads the same shared pages.
Peers: FlashInfer (paged decode; cascade, backend fa2), and with --fa3 FILE a FlashAttention 3.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.codec_decode import CodecDecode, DecodeNumbers
from stemserve.kernels.layout import AttentionLayout, HeadShape, int32

Nodes = list[tuple[int, int]]  # parent, tokens
Call = Callable[[LayerKV], torch.Tensor]
PAGE = 16
BYTES_A_SECOND, FLOPS_A_SECOND = 4.3e12, 790e12
WARM, REPLAYS, CALLS = 3, 20, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    nodes: Nodes
    shape: HeadShape
    layout: AttentionLayout

    @property
    def leaves(self) -> list[int]:
        return [int(node) for node in self.layout.segment_node]

    @property
    def floor_us(self) -> float:
        shape, tokens = self.shape, sum(tokens for _, tokens in self.nodes)
        rows = len(self.leaves)
        read = 4 * shape.head_dim * (tokens * shape.kv_heads + rows * shape.query_heads)
        seen = int(self.layout.chain_tokens.sum())
        flops = 4 * shape.head_dim * shape.query_heads * seen
        return max(read / BYTES_A_SECOND, flops / FLOPS_A_SECOND) * 1e6


def levels(counts: list[int], tokens: list[int]) -> Nodes:
    nodes: Nodes = []
    above: list[int] = []
    for count, length in zip(counts, tokens, strict=True):
        parents = [above[child * len(above) // count] if above else -1 for child in range(count)]
        above = list(range(len(nodes), len(nodes) + count))
        nodes += [(parent, length) for parent in parents]
    return nodes


def table_trees() -> dict[str, Nodes]:
    chain: Nodes = []
    for step in range(16):
        chain += [(2 * step - 2 if step else -1, 4096), (2 * step, 256)]
    forest: Nodes = []
    for _ in range(8):
        root = len(forest)
        forest += [(-1, 4096), *[(root, 256)] * 8]
    return {
        "1 x 51200 + 16 x 512": levels([1, 16], [51200, 512]),
        "1 x 122880 + 8 x 256": levels([1, 8], [122880, 256]),
        "1 x 8192 + 64 x 256": levels([1, 64], [8192, 256]),
        "1 x 1024 + 64 x 256": levels([1, 64], [1024, 256]),
        "1 x 8192 + 128 x 2048": levels([1, 128], [8192, 2048]),
        "binary, depth 5, 4096": levels([1, 2, 4, 8, 16], [4096] * 5),
        "4-ary, depth 3, 4096": levels([1, 4, 16], [4096] * 3),
        "5-ary, depth 3, 2048": levels([1, 5, 25], [2048] * 3),
        "chain of 16 x 4096, a leaf of 256 each": chain,
        "8 x (4096 + 8 x 256)": forest,
        "no sharing, 32 x 8192": [(-1, 8192)] * 32,
    }


def case_of(name: str, nodes: Nodes, heads: tuple[int, int, int]) -> Case:
    inner = {parent for parent, _ in nodes}
    leaves = [node for node in range(len(nodes)) if node not in inner]
    pages = np.array([-(-tokens // PAGE) for _, tokens in nodes])
    indptr = np.concatenate([[0], np.cumsum(pages)])
    layout = AttentionLayout(
        page_size=PAGE,
        node_parent=int32([parent for parent, _ in nodes]),
        node_page_indptr=int32(indptr),
        node_pages=int32(np.random.default_rng(len(nodes)).permutation(int(indptr[-1]))),
        node_tokens=int32([tokens for _, tokens in nodes]),
        segment_indptr=int32(range(len(leaves) + 1)),
        segment_node=int32(leaves),
        segment_is_item=np.zeros(len(leaves), np.bool_),
    )
    query_heads, kv_heads, dim = heads
    shape = HeadShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5)
    return Case(name=name, nodes=nodes, shape=shape, layout=layout)


def make_kv(case: Case, dtype: torch.dtype) -> LayerKV:
    shape = case.shape
    size = (len(case.layout.node_pages), PAGE, shape.kv_heads, shape.head_dim)
    k, v = (torch.randn(size, dtype=dtype, device="cuda") for _ in range(2))
    return LayerKV(k, v, k[:0, 0], v[:0, 0])


def reference(case: Case, q: torch.Tensor, kv: LayerKV) -> torch.Tensor:
    """Float64 attention of each leaf over its gathered chain."""
    shape, layout, outs = case.shape, case.layout, []
    flat_k, flat_v = kv.k_pages.flatten(0, 1), kv.v_pages.flatten(0, 1)
    for row, leaf in enumerate(case.leaves):
        slots = [
            (layout.pages(node).astype(np.int64)[:, None] * PAGE + np.arange(PAGE)).ravel()[
                : layout.node_tokens[node]
            ]
            for node in layout.chain(leaf)
        ]
        index = torch.from_numpy(np.concatenate(slots)).cuda()
        keys = flat_k[index].double().transpose(0, 1)
        values = flat_v[index].double().transpose(0, 1)
        rows = q[row].double().view(shape.kv_heads, shape.group, shape.head_dim)
        weights = (rows @ keys.transpose(1, 2) * shape.scale).softmax(-1)
        outs.append((weights @ values).view(shape.query_heads, shape.head_dim))
    return torch.stack(outs)


def own_call(case: Case, q: torch.Tensor, merge: bool = True) -> Call:
    decode = CodecDecode(case.shape, q.device, DecodeNumbers(dtype=q.dtype))
    plan = decode.plan(case.layout)
    if not merge:
        plan.merges = False
    target = AttentionState(torch.empty_like(q), torch.empty(q.shape[:2], device=q.device))

    def call(kv: LayerKV) -> torch.Tensor:
        decode.run_into(plan, q, kv, target)
        return target.out

    return call


def plan_ms(case: Case) -> float:
    decode = CodecDecode(case.shape, torch.device("cuda"), DecodeNumbers(dtype=torch.float16))
    plan = decode.plan(case.layout)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        decode.replan(plan, case.layout)
        times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return statistics.median(times) * 1e3


def block_tables(case: Case) -> list[np.ndarray[Any, Any]]:
    return [case.layout.chain_pages(leaf) for leaf in case.leaves]


def fa3_call(case: Case, q: torch.Tensor) -> Call:
    tables = block_tables(case)
    width = max(len(table) for table in tables)
    table = np.zeros((len(tables), width), np.int32)
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = pages
    block_table = torch.from_numpy(table).cuda()
    lengths = torch.from_numpy(case.layout.chain_tokens).cuda()
    indptr = torch.arange(len(tables) + 1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)
    most = int(case.layout.chain_tokens.max())
    scale = case.shape.scale

    def call(kv: LayerKV) -> torch.Tensor:
        none = None
        torch.ops._vllm_fa3_C.fwd(
            q, kv.k_pages, kv.v_pages, none, none, none, out, indptr, none, none, none, lengths,
            1, most, block_table, none, none, none, none, none, none, none, none, scale, True,
            -1, -1, 0.0, True, none, 0, none, 0, none, 1, 0, none,
        )  # fmt: skip
        return out

    return call


def flashinfer_decode(case: Case, q: torch.Tensor) -> Call:
    import flashinfer

    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )
    tables, shape = block_tables(case), case.shape
    indptr = np.concatenate([[0], np.cumsum([len(table) for table in tables])])
    tail = (case.layout.chain_tokens - 1) % PAGE + 1
    wrapper.plan(
        *(torch.from_numpy(int32(a)).cuda() for a in (indptr, np.concatenate(tables), tail)),
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    out = torch.empty_like(q)
    return lambda kv: wrapper.run(q, (kv.k_pages, kv.v_pages), out=out)


def cascade_levels(case: Case) -> list[tuple[list[int], list[int]]]:
    """Per level: rows of each group (indptr), and the node of each (-1: none)."""
    chains = [case.layout.chain(leaf) for leaf in case.leaves]
    found = []
    for level in range(max(len(chain) for chain in chains)):
        indptr, nodes = [0], []
        for row, chain in enumerate(chains):
            node = chain[level] if level < len(chain) else -1
            if nodes and node >= 0 and nodes[-1] == node:
                indptr[-1] = row + 1
            else:
                nodes.append(node)
                indptr.append(row + 1)
        found.append((indptr, nodes))
    return found


def flashinfer_cascade(case: Case, q: torch.Tensor) -> Call:
    import flashinfer

    stages, shape, layout = cascade_levels(case), case.shape, case.layout
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(stages), workspace, "NHD")
    for level in wrapper._batch_prefill_wrappers:
        level._backend = "fa2"  # `auto` takes fa3, which is slower for one row a request
    arrays: list[list[torch.Tensor]] = [[], [], [], []]
    for rows, nodes in stages:
        pages = [layout.pages(node) if node >= 0 else int32([]) for node in nodes]
        lengths = [int(layout.node_tokens[node]) if node >= 0 else 0 for node in nodes]
        indptr = np.concatenate([[0], np.cumsum([len(p) for p in pages])])
        tail = [(length - 1) % PAGE + 1 if length else 0 for length in lengths]
        for place, values in enumerate((rows, indptr, np.concatenate(pages), tail)):
            arrays[place].append(torch.from_numpy(int32(values)).cuda())
    wrapper.plan(
        *arrays, shape.query_heads, shape.kv_heads, shape.head_dim, PAGE, causal=False,
        q_data_type=q.dtype,
    )  # fmt: skip
    return lambda kv: wrapper.run(q, (kv.k_pages, kv.v_pages))


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
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    graph.replay()
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def measure(
    case: Case, engines: dict[str, Callable[[Case, torch.Tensor], Call]], rounds: int
) -> dict[str, Any]:
    size = 4e-6 * len(case.layout.node_pages) * PAGE * case.shape.kv_heads * case.shape.head_dim
    sets = [make_kv(case, torch.float16) for _ in range(max(2, min(CALLS, math.ceil(400 / size))))]
    q = torch.randn(
        (len(case.leaves), case.shape.query_heads, case.shape.head_dim), device="cuda"
    ).half()
    exact = reference(case, q, sets[0])
    row: dict[str, Any] = {"tree": case.name, "rows": len(q), "floor_us": case.floor_us}
    graphs: dict[str, list[torch.cuda.CUDAGraph]] = {}
    keep = []
    for name, make in engines.items():
        try:
            call = make(case, q)
            error = (call(sets[0]).double() - exact).norm() / exact.norm()
            row[name] = {"error": float(error)}
            one = graph_of([lambda call=call: call(sets[0])])
            many = graph_of(
                [lambda call=call, i=i: call(sets[i % len(sets)]) for i in range(CALLS)]
            )
            graphs[name] = [one, many]
            keep.append(call)
        except Exception as error:  # a peer that cannot run a tree is listed with its reason
            row[name] = {"failed": repr(error)[:300]}
    times: dict[str, list[list[float]]] = {name: [[], []] for name in graphs}
    for _ in range(rounds):  # in turns: the clock falls under the power cap
        for name, (one, many) in graphs.items():
            times[name][0].append(replay_us(one, REPLAYS))
            times[name][1].append(replay_us(many, 5) / CALLS)
    for name, (one, many) in times.items():
        row[name] |= {"replay_us": statistics.median(one), "cold_us": statistics.median(many)}
    return row


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summary(rows: list[dict[str, Any]], peers: list[str], least_us: float) -> dict[str, float]:
    result = {}
    for kind in ("replay_us", "cold_us"):
        long = [row for row in rows if row["floor_us"] >= least_us]
        result[f"vs_floor_{kind}"] = geometric([r["codec"][kind] / r["floor_us"] for r in long])
        result[f"vs_floor_all_{kind}"] = geometric([r["codec"][kind] / r["floor_us"] for r in rows])
        known = [
            (min(r[p][kind] for p in peers if kind in r.get(p, {})), r)
            for r in rows
            if any(kind in r.get(p, {}) for p in peers)
        ]
        if known:
            ratios = [best / r["codec"][kind] for best, r in known]
            result[f"vs_best_peer_{kind}"] = geometric(ratios)
            result[f"worst_vs_best_peer_{kind}"] = min(ratios)
        fa3 = [r["fa3"][kind] / r["codec"][kind] for r in rows if kind in r.get("fa3", {})]
        result[f"vs_fa3_{kind}"] = geometric(fa3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", action="store_true", help="FlashInfer's paged decode, cascade")
    parser.add_argument("--fa3", type=Path, help="library of a FlashAttention 3 build")
    parser.add_argument("--trees", type=Path, help="file of trees; those with floors of 20 us up")
    parser.add_argument("--apart", action="store_true", help="also without the merge")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    engines: dict[str, Callable[[Case, torch.Tensor], Call]] = {"codec": own_call}
    peers = []
    if options.apart:
        engines["no_merge"] = lambda case, q: own_call(case, q, merge=False)
    if options.peers:
        engines |= {"fi_decode": flashinfer_decode, "fi_cascade_fa2": flashinfer_cascade}
        peers = ["fi_decode", "fi_cascade_fa2"]
    if options.fa3:
        torch.ops.load_library(str(options.fa3))
        engines["fa3"] = fa3_call
        peers.append("fa3")
    cases = [case_of(name, nodes, (32, 8, 128)) for name, nodes in table_trees().items()]
    if options.trees:
        trees = json.loads(options.trees.read_text())
        cases = [case_of(name, tree["nodes"], tuple(tree["heads"])) for name, tree in trees.items()]
        cases = [case for case in cases if case.floor_us >= 20]
    rows = []
    for case in cases:
        row = measure(case, engines, options.rounds) | {"plan_ms": plan_ms(case)}
        rows.append(row)
        shown = [
            f"{name} {row[name]['replay_us']:.1f}/{row[name]['cold_us']:.1f}"
            if "replay_us" in row[name]
            else f"{name} failed"
            for name in engines
        ]
        ratio = [
            row["codec"].get(kind, math.nan) / case.floor_us for kind in ("replay_us", "cold_us")
        ]
        print(
            f"{case.name[:44]:44s} floor {case.floor_us:6.1f} x{ratio[0]:.3f}/{ratio[1]:.3f}"
            f" err {row['codec'].get('error', math.nan):.1e} plan {row['plan_ms']:.2f} | "
            + ", ".join(shown),
            flush=True,
        )
    result = summary(rows, peers, 20)
    print(json.dumps(result, indent=1))
    if options.out:
        device = torch.cuda.get_device_name()
        header = {
            "device": device,
            "torch": torch.__version__,
            "command": " ".join(["python", "benchmarks/bench_codec.py", *sys.argv[1:]]),
        }
        options.out.write_text(json.dumps(header | {"summary": result, "trees": rows}, indent=1))


if __name__ == "__main__":
    main()
