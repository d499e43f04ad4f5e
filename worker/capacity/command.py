"""`python -m stemserve.worker capacity`: how many GPUs for so many calls, by the cost tables."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from stemserve.kernels.pricing.cost_table_file import of_dtype, shipped_cost_tables, table_for_heads
from stemserve.worker.argument_types import amount, positive, up_to
from stemserve.worker.capacity.device_rates import GIB, RATES
from stemserve.worker.capacity.fleet import fleet, memory
from stemserve.worker.capacity.forward_seconds import ForwardSeconds
from stemserve.worker.capacity.prediction import Prediction
from stemserve.worker.capacity.report import Answer, as_json, as_text
from stemserve.worker.capacity.workload import UNITS, Demand, Workload
from stemserve.worker.choice.costs import given_tables
from stemserve.worker.config import (
    GPU_MEMORY_UTILIZATION,
    GPU_STEP_TOKENS,
    ConfigError,
    KvCacheDtype,
)
from stemserve.worker.models.loader import read_model_config

RESERVE_GIB = 4.0
DECODE_ROWS = 64
MOST_TOKENS = 1 << 20  # far above what a model takes, and soon laid out into steps
MOST_ITEMS = 100_000
DESCRIPTION = """\
Predict how many GPUs answer so many calls: attention by its cost table, the rest by rates
measured on the device. No GPU is needed. docs/capacity.md says how far predictions were from
what was measured."""
EXAMPLES = """\
examples:
  stemserve capacity --model ./Qwen3-0.6B --prefix-tokens 2048 --items 100 --item-tokens 64 \\
      --hit-rate 0.5 --items-per-second 50000 --latency-ms 200
  stemserve capacity --model ./Qwen3-0.6B --prefix-tokens 1024 --samples 16 --new-tokens 256 \\
      --tokens-per-second 100000"""
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def capacity(arguments: Sequence[str]) -> int:
    """Raises ConfigError or ModelError."""
    options = _parser().parse_args(arguments)
    try:
        answer = _answer(options)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"such a load cannot be priced: {error}") from error
    print(json.dumps(as_json(answer)) if options.json else as_text(answer))
    return 0


def _answer(options: argparse.Namespace) -> Answer:
    workload, demand = _workload(options), _demand(options)
    prediction = Prediction(
        forward=_forward(options),
        workload=workload,
        step_rows=options.max_step_tokens,
        decode_rows=options.decode_rows,
    )
    return Answer(
        device=options.device,
        prediction=prediction,
        demand=demand,
        fleet=fleet(prediction, demand),
        memory=memory(
            prediction,
            utilization=options.gpu_memory_utilization,
            reserve=int(options.reserve_gib * GIB),
            kv_itemsize=1 if options.kv_cache_dtype is KvCacheDtype.FP8_E4M3 else None,
        ),
    )


def _workload(options: argparse.Namespace) -> Workload:
    return Workload(
        prefix_tokens=options.prefix_tokens,
        hit_rate=options.hit_rate,
        items=options.items,
        item_tokens=options.item_tokens,
        token_logprobs=options.token_logprobs,
        samples=options.samples,
        new_tokens=options.new_tokens,
    )


def _demand(options: argparse.Namespace) -> Demand:
    given = {unit: getattr(options, f"{unit}_per_second") for unit in UNITS}
    asked = [(unit, value) for unit, value in given.items() if value is not None]
    if len(asked) > 1:
        names = " or ".join(f"--{unit}-per-second" for unit in UNITS)
        raise ConfigError(f"give one of {names}")
    unit, per_second = asked[0] if asked else (UNITS[0], None)
    return Demand(
        per_second=per_second,
        unit=unit,
        latency_s=None if options.latency_ms is None else options.latency_ms / 1e3,
        headroom=options.headroom,
        spares=options.spares,
    )


def _forward(options: argparse.Namespace) -> ForwardSeconds:
    config = read_model_config(options.model)
    if options.cost_table is not None:
        tables = given_tables(options.cost_table)
    else:
        tables = tuple(of_dtype(shipped_cost_tables(options.device), options.dtype))
    rates = RATES[options.device]
    if options.memory_gib is not None:
        rates = replace(rates, memory_size=int(options.memory_gib * GIB))
    return ForwardSeconds(
        model=config,
        dtype=HALVES[options.dtype],
        rates=rates,
        costs=table_for_heads(tables, config.heads),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stemserve capacity",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model(parser)
    _add_calls(parser)
    _add_demand(parser)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--model", type=Path, required=True, metavar="PATH",
        help="a model as serve's, or a config.json; only its shape is read",
    )  # fmt: skip
    group.add_argument("--device", choices=list(RATES), default=next(iter(RATES)))
    group.add_argument("--dtype", choices=list(HALVES), default="bfloat16")
    group.add_argument(
        "--cost-table", type=Path, metavar="FILE", help="of stemserve calibrate on that device"
    )
    group.add_argument("--kv-cache-dtype", type=KvCacheDtype, choices=list(KvCacheDtype),
                       default=KvCacheDtype.AUTO)  # fmt: skip
    group.add_argument(
        "--max-step-tokens", type=positive, default=GPU_STEP_TOKENS, metavar="N", help="as serve's"
    )
    group.add_argument("--gpu-memory-utilization", type=_share, default=GPU_MEMORY_UTILIZATION,
                       metavar="SHARE", help="as serve's")  # fmt: skip
    group.add_argument(
        "--memory-gib", type=amount, metavar="GIB", help="of a GPU; the device's own"
    )
    group.add_argument(
        "--reserve-gib", type=amount, default=RESERVE_GIB, metavar="GIB",
        help="for graphs, the largest step and libraries; the server's log says how much it is",
    )  # fmt: skip


def _add_calls(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calls")
    group.add_argument("--prefix-tokens", type=up_to(MOST_TOKENS), required=True, metavar="N")
    group.add_argument(
        "--hit-rate", type=float, default=0.0, metavar="SHARE",
        help="of calls whose prefix is cached",
    )  # fmt: skip
    group.add_argument(
        "--items", type=up_to(MOST_ITEMS), default=0, metavar="N", help="of a Score call"
    )
    group.add_argument("--item-tokens", type=up_to(MOST_TOKENS), default=0, metavar="N")
    group.add_argument(
        "--token-logprobs", action="store_true",
        help="every token of an item is read (log-likelihood), not its last one only (labels)",
    )  # fmt: skip
    group.add_argument(
        "--samples",
        type=up_to(MOST_ITEMS),
        default=0,
        metavar="N",
        help="of a Generate call, instead",
    )
    group.add_argument(
        "--new-tokens", type=up_to(MOST_TOKENS), default=0, metavar="N", help="of a sample"
    )
    group.add_argument(
        "--decode-rows", type=up_to(MOST_ITEMS), default=DECODE_ROWS, metavar="N",
        help="samples that are generated together on a GPU",
    )  # fmt: skip


def _add_demand(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("demand")
    for unit in UNITS:
        group.add_argument(f"--{unit}-per-second", type=amount, metavar="X")
    group.add_argument(
        "--latency-ms", type=amount, metavar="MS", help="that 99 of 100 calls stay within"
    )
    group.add_argument(
        "--headroom", type=float, default=0.3, metavar="SHARE", help="of each GPU, kept free"
    )
    group.add_argument(
        "--spares", type=int, default=1, metavar="N", help="GPUs that may fail; added"
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError(text)
    return value


_share.__name__ = "share from 0 to 1"  # argparse names the type in its message
