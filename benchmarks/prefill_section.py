"""Measure every strategy of prefill on a shape, and what dispatch's choice costs there."""

from functools import partial
from typing import Any

import torch
from choices import Choices, worth_timing
from decode_section import WRONG
from kernel_clock import eager_us, graph_of, host_ms, replay_us
from kernel_summary import NO_DIFFERENCE_US, regret
from prefill_check import Checked, inputs
from prefill_shapes import PrefillShape
from turns import in_turns

from stemserve.kernels.attention_state import AttentionState, LayerKV
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.strategy import Kernel, Phase, Strategy
from stemserve.worker.choice.dispatch import Prediction

Row = dict[str, Any]

FULL_PROMPT_BYTES = 16 << 30  # more are not made


def measure_shape(shape: PrefillShape, choices: Choices, rounds: int) -> Row:
    layout, heads = shape.layout(), shape.heads
    predictions = choices.predictions(Phase.PREFILL, layout, heads)
    q, kv = inputs(layout, heads, choices.dtype)
    checked = Checked.of(layout, q, kv, heads)
    found: dict[str, Row] = {str(p.kernel): _listed(p) for p in predictions}
    calls: dict[str, partial[AttentionState]] = {}
    for prediction in worth_timing(predictions):
        strategy = choices.strategies(heads)[Phase.PREFILL, prediction.kernel]
        entry, call = _prepare(strategy, layout, q, kv, checked)
        found[str(prediction.kernel)] = {"predicted_us": _us(prediction.seconds)} | entry
        if call is not None:
            calls[str(prediction.kernel)] = call
    # Back-to-back eager calls decide, as they do between the layers of a model.
    timers = {name: partial(eager_us, call) for name, call in calls.items()}
    for name, us in in_turns(timers, rounds).items():
        found[name]["us"] = us
        found[name]["graph_us"] = _graph_us(calls[name])
    chosen = str(predictions[0].kernel)
    times = {name: float(found[name]["us"]) for name in calls}
    return _facts(shape) | {
        "chosen": chosen,
        "regret": regret(times, chosen, NO_DIFFERENCE_US) if times else None,
        "strategies": found,
        **_full_prompts(shape, choices, predictions[0].seconds),
    }


def _facts(shape: PrefillShape) -> Row:
    return {
        "prefix": shape.prefix,
        "item": shape.item,
        "items": shape.items,
        "heads": [shape.query_heads, shape.kv_heads, shape.heads.head_dim],
        "cached": shape.cached,
        "grid": shape.grid,
        "rows": shape.rows,
        "flops": shape.flops,
        "floor_us": round(shape.floor_us, 4),
    }


def _us(seconds: float) -> float:
    return float(f"{seconds * 1e6:.5g}")


def _listed(prediction: Prediction) -> Row:
    """Of a strategy that is not timed."""
    if prediction.refusal is not None:
        return {"refused": prediction.refusal}
    return {"far_us": _us(prediction.seconds)}


def _prepare(
    strategy: Strategy, layout: AttentionLayout, q: torch.Tensor, kv: LayerKV, checked: Checked
) -> tuple[Row, partial[AttentionState] | None]:
    try:
        plan = strategy.plan(layout)
        call = partial(strategy.run, plan, q, kv)
        error = checked.error(call().out)
        if not error < WRONG:
            return {"wrong": True, "error": error}, None
        entry = {
            "error": float(f"{error:.3g}"),
            "plan_ms": round(host_ms(partial(strategy.plan, layout), 3), 3),
        }
        return entry, call
    except Exception as reason:  # one strategy's failure is listed, the others go on
        torch.cuda.synchronize()
        return {"failed": repr(reason)[:300]}, None


def _graph_us(call: partial[AttentionState]) -> float | None:
    """The device alone, where the call can be captured."""
    try:
        return round(replay_us(graph_of([call])), 2)
    except RuntimeError:
        torch.cuda.synchronize()
        return None


def _full_prompts(shape: PrefillShape, choices: Choices, best_seconds: float) -> Row:
    """Every item's whole prompt computed by itself, by the naive strategy or a faster one."""
    heads = shape.heads
    rows = max(1, shape.items) * (shape.prefix + shape.item)
    if rows * heads.query_heads * heads.head_dim * 8 > FULL_PROMPT_BYTES or not shape.items:
        return {}
    layout = shape.full_prompts()
    predictions = choices.predictions(Phase.PREFILL, layout, heads)
    able = [found for found in predictions if found.refusal is None]
    tried = {found.kernel: found for found in able[:1] + able if _is_tried(found, able[0])}
    if not shape.grid and able[0].seconds > 10 * best_seconds:
        return {"full_prompts_far_us": _us(able[0].seconds)}
    q, kv = inputs(layout, heads, choices.dtype)
    checked = Checked.of(layout, q, kv, heads)
    times: dict[str, float] = {}
    for kernel in tried:
        strategy = choices.strategies(heads)[Phase.PREFILL, kernel]
        entry, call = _prepare(strategy, layout, q, kv, checked)
        if call is not None:
            times[str(kernel)] = round(eager_us(call, most_calls=10), 2)
    if not times:
        return {}
    fastest = min(times, key=lambda name: times[name])
    return {"full_prompts_us": times[fastest], "full_prompts_by": fastest}


def _is_tried(found: Prediction, best: Prediction) -> bool:
    near = found.seconds <= 2 * best.seconds
    return found.kernel is best.kernel or (found.kernel is Kernel.NAIVE and near)
