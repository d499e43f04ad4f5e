"""The answer to a question of capacity, as text and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from stemserve.worker.capacity.device_rates import GIB
from stemserve.worker.capacity.fleet import Fleet, Memory
from stemserve.worker.capacity.forward_seconds import Seconds
from stemserve.worker.capacity.prediction import Prediction
from stemserve.worker.capacity.workload import Demand


@dataclass(frozen=True, kw_only=True)
class Answer:
    device: str
    prediction: Prediction
    demand: Demand
    fleet: Fleet
    memory: Memory


def as_json(answer: Answer) -> dict[str, Any]:
    """Seconds, bytes and counts."""
    prediction, fleet = answer.prediction, answer.fleet
    work = prediction.workload
    per_second = prediction.calls_per_second
    found: dict[str, Any] = {
        "device": answer.device,
        "model": prediction.forward.model.architecture,
        "alone_s": prediction.alone_s,
        "gpu_s": asdict(prediction.prefill(1)),
        "front_end_s": prediction.front_end_s,
        "host_s": prediction.host_s(),
        "busy_s": prediction.busy_s,
        "limit": prediction.limit,
        "calls_per_second": per_second,
        "items_per_second": per_second * work.items,
        "tokens_per_second": per_second * work.own_tokens,
        "load": fleet.load,
        "p99_s": fleet.latency_s,
        "gpus": fleet.gpus,
        "spares": answer.demand.spares,
        "memory": asdict(answer.memory) | {"kv_tokens": answer.memory.kv_tokens},
    }
    if work.generates:
        found["token_s"] = asdict(prediction.token)
    return found


def as_text(answer: Answer) -> str:
    lines = [*_call(answer), *_most(answer), *_fleet(answer), *_memory(answer)]
    return "\n".join(lines)


def _call(answer: Answer) -> list[str]:
    prediction = answer.prediction
    work, gpu = prediction.workload, prediction.prefill(1)
    what = f"{work.items} items of {work.item_tokens}"
    if work.generates:
        what = f"{work.samples} samples of {work.new_tokens}"
    alone = (
        f"alone {_ms(prediction.alone_s)}: front end {_ms(prediction.front_end_s)}, worker's host "
        f"{_ms(prediction.host_s())}, GPU {_ms(gpu.total)} (attention {_ms(gpu.attention)}, "
        f"products {_ms(gpu.products)}, the rest {_ms(_rest(gpu.total, gpu))})"
    )
    lines = [
        f"{answer.device}, {prediction.forward.model.architecture}; a call of "
        f"{work.prefix_tokens:,} prefix tokens (cached in {work.hit_rate:.0%} of the calls), "
        f"{what} tokens",
        alone,
    ]
    if work.generates:
        lines.append(
            f"then a token of each of {prediction.decode_rows} samples every "
            f"{_ms(prediction.token.total)}"
        )
    return lines


def _rest(total: float, gpu: Seconds) -> float:
    return total - gpu.attention - gpu.products


def _most(answer: Answer) -> list[str]:
    prediction = answer.prediction
    work, calls = prediction.workload, prediction.calls_per_second
    size, unit = (work.own_tokens, "tokens") if work.generates else (work.items, "items")
    return [
        f"one GPU at most {calls:,.1f} calls/s, {calls * size:,.0f} {unit}/s; "
        f"the {prediction.limit} is the limit"
    ]


def _fleet(answer: Answer) -> list[str]:
    fleet, demand = answer.fleet, answer.demand
    at_load = f"at {fleet.load:.0%} of that 99 of 100 calls within {_ms(fleet.latency_s)}"
    if fleet.gpus is None or demand.per_second is None:
        return [at_load]
    gpus = "1 GPU" if fleet.gpus == 1 else f"{fleet.gpus} GPUs"
    return [
        f"{demand.per_second:,g} {demand.unit}/s: {gpus}, {demand.spares} of them spare; {at_load}"
    ]


def _memory(answer: Answer) -> list[str]:
    room = answer.memory
    work = answer.prediction.workload
    prefixes = room.kv_tokens // (work.prefix_tokens + work.own_tokens)
    return [
        f"memory of a GPU: {room.total / GIB:.1f} GiB, of that weights {room.weights / GIB:.1f}, "
        f"kept free {room.reserve / GIB:.1f}, KV {room.kv / GIB:.1f} = {room.kv_tokens:,} tokens "
        f"({prefixes:,} such calls)"
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
