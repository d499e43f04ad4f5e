"""The fused kernels of a layer and of label scoring, beside plain torch and their floors, on a GPU.

    python benchmarks/fused_kernels.py [--rows 64 1024 8192] [--output FILE]

bfloat16, shapes of Qwen3-0.6B and Qwen3-4B. A time is that of one call in a CUDA graph of calls on
different inputs, ours and torch's taking turns. The floor: bytes at 4.3 TB/s, FLOPs at 790 TFLOP/s.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from kernel_clock import graph_of, replay_us
from torch import Tensor

from stemserve.kernels.fused.logits import chosen_logprobs
from stemserve.kernels.host_array import device_tensor
from stemserve.worker.memory.kv_pool import KvPool, KvShape
from stemserve.worker.models.layer_ops import LayerOps
from stemserve.worker.models.model_config import Family, Head, ModelConfig
from stemserve.worker.models.rope import RopeConfig
from stemserve.worker.models.torch_ops import TorchOps
from stemserve.worker.models.triton_ops import TritonOps
from stemserve.worker.steps.kv_writes import KvWrites

Row = dict[str, Any]

ROWS = (64, 1024, 8192)
ROUNDS = 3
BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6
COLD_BYTES = 200 << 20  # of all inputs, some L2 caches
MOST_SETS = 16
CHUNK_ROWS = 55  # whose float32 logits are 32 MiB
WRONG = 2e-2  # relative to the norm of torch's result in bfloat16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on one shape, our way and torch's way on the same inputs."""

    name: str
    model: str
    rows: int
    floor_us: float
    ours: Sequence[Callable[[], Any]]
    torch_way: Sequence[Callable[[], Any]]


def qwen3(name: str) -> ModelConfig:
    wide = name == "Qwen3-4B"
    return ModelConfig(
        architecture="Qwen3ForCausalLM",
        family=Family.QWEN3,
        head=Head.LANGUAGE_MODEL,
        vocab_size=151_936,
        context_tokens=16_384,
        num_layers=1,
        hidden_size=2560 if wide else 1024,
        query_heads=32 if wide else 16,
        kv_heads=8,
        head_dim=128,
        intermediate_size=9728 if wide else 3072,
        rope=RopeConfig(theta=1e6),
        rms_eps=1e-6,
        qk_norm=True,
    )


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


class Cases:
    def __init__(self, model: str) -> None:
        self._model = model
        self._config = qwen3(model)
        device = torch.device("cuda")
        self._ours: LayerOps = TritonOps(self._config, device)
        self._torch: LayerOps = TorchOps(self._config, device)

    def of(self, rows: int) -> list[Callable[[], Case]]:
        """Made one after the other: their inputs are large."""
        makers = (self._norm, self._add_norm, self._heads, self._gate, self._logprobs)
        return [partial(maker, rows) for maker in makers]

    def _case(
        self, name: str, rows: int, numbers: int, call: Callable[..., Any], *widths: int
    ) -> Case:
        """`numbers` are read or written a row; `call` takes the operations and its inputs."""
        size = 2 * rows * numbers
        count = max(2, min(MOST_SETS, math.ceil(COLD_BYTES / size)))
        sets = [[randn(rows, width) for width in widths] for _ in range(count)]
        copies = [[x.clone() for x in inputs] for inputs in sets]  # some change in place
        return Case(
            name=name,
            model=self._model,
            rows=rows,
            floor_us=size / BYTES_PER_US,
            ours=[partial(call, self._ours, *inputs) for inputs in sets],
            torch_way=[partial(call, self._torch, *inputs) for inputs in copies],
        )

    def _norm(self, rows: int) -> Case:
        hidden = self._config.hidden_size
        weight = randn(hidden)
        return self._case("norm", rows, 2 * hidden, lambda ops, x: ops.norm(x, weight), hidden)

    def _add_norm(self, rows: int) -> Case:
        hidden = self._config.hidden_size
        weight = randn(hidden)
        return self._case(
            "add + norm",
            rows,
            4 * hidden,
            lambda ops, x, residual: ops.add_norm(x, residual, weight),
            hidden,
            hidden,
        )

    def _heads(self, rows: int) -> Case:
        config, device = self._config, torch.device("cuda")
        shape = KvShape(
            layers=1,
            pages=rows // 16 + 8,
            page_size=16,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
        )
        order = np.random.default_rng(0).permutation(rows // 16)
        slots = (order[:, None] * 16 + np.arange(16)).ravel().astype(np.int32)
        pages = KvWrites(KvPool(shape, device), device_tensor(slots, device))
        positions = torch.arange(rows, device=device) % config.context_tokens
        norm = randn(config.query_heads + config.kv_heads, config.head_dim)
        split = {ops: ops.heads(positions, pages) for ops in (self._ours, self._torch)}
        qkv = config.query_size + 2 * config.kv_size
        # Read once, written once, and keys and values again to the pages.
        numbers = 2 * qkv + 2 * config.kv_size
        return self._case(
            "norm, rope, pages", rows, numbers, lambda ops, x: split[ops](0, x, norm), qkv
        )

    def _gate(self, rows: int) -> Case:
        width = self._config.intermediate_size
        return self._case("gate", rows, 3 * width, lambda ops, x: ops.gate(x), 2 * width)

    def _logprobs(self, rows: int) -> Case:
        width, vocab = self._config.hidden_size, self._config.vocab_size
        hidden, weight = randn(rows, width), randn(vocab, width) * width**-0.5
        at = torch.arange(rows, device="cuda")
        tokens = torch.randint(vocab, (rows,), device="cuda")
        size, flops = 2 * width * (vocab + rows), 2 * rows * vocab * width
        return Case(
            name="chosen log-probabilities",
            model=self._model,
            rows=rows,
            floor_us=max(size / BYTES_PER_US, flops / FLOPS_PER_US),
            ours=[lambda: chosen_logprobs(hidden, weight, at, tokens)[:2]],
            torch_way=[lambda: full_logprobs(hidden, weight, tokens)],
        )


def full_logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of one token a row, with the most likely token of each row."""
    logprobs = torch.empty(len(hidden), device=hidden.device)
    argmax = torch.empty_like(tokens)
    for start in range(0, len(hidden), CHUNK_ROWS):
        some = slice(start, start + CHUNK_ROWS)
        logits = F.linear(hidden[some], weight).float()
        logprobs[some] = logits.log_softmax(-1).gather(1, tokens[some, None]).squeeze(1)
        argmax[some] = logits.argmax(-1)
    return logprobs, argmax


def measured(case: Case, rounds: int = ROUNDS) -> Row:
    error = difference(case.ours[0](), case.torch_way[0]())
    if error > WRONG:
        raise RuntimeError(f"{case.name}, {case.rows} rows: differs by {error} from torch")
    graphs = {"ours": graph_of(case.ours), "torch": graph_of(case.torch_way)}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):  # in turns: the clock falls under the power cap
        for name, graph in graphs.items():
            times[name].append(replay_us(graph) / len(case.ours))
    ours, torch_way = (statistics.median(times[name]) for name in ("ours", "torch"))
    return {
        "kernel": case.name,
        "model": case.model,
        "rows": case.rows,
        "us": round(ours, 2),
        "torch_us": round(torch_way, 2),
        "floor_us": round(case.floor_us, 2),
        "over_floor": round(ours / case.floor_us, 3),
        "speedup": round(torch_way / ours, 2),
    }


def difference(ours: Any, torch_way: Any) -> float:
    """The largest of the results' distances, relative to torch's; indices do not count."""
    pairs = [(ours, torch_way)] if isinstance(ours, Tensor) else zip(ours, torch_way, strict=True)
    return max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in pairs
        if a.is_floating_point()
    )


def fused_rows(rows: Sequence[int] = ROWS, rounds: int = ROUNDS) -> list[Row]:
    """The section of a run's results."""
    found: list[Row] = []
    for model in ("Qwen3-0.6B", "Qwen3-4B"):
        cases = Cases(model)
        found += [measured(make(), rounds) for count in rows for make in cases.of(count)]
    return found


def line_of(row: Row) -> str:
    return (
        f"{row['model']:11s} {row['kernel']:26s} {row['rows']:5d} rows {row['us']:9.1f} us"
        f"  floor {row['floor_us']:8.1f} x{row['over_floor']:5.2f}"
        f"  torch {row['torch_us']:9.1f} x{row['speedup']:5.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = fused_rows(options.rows)
    print("\n".join(line_of(row) for row in rows))
    if options.output:
        options.output.write_text(json.dumps({"fused": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
