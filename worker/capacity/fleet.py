"""How many GPUs meet a demand, and what fits into the memory of one."""

import math
from dataclasses import dataclass

from stemserve.worker.capacity.prediction import Prediction
from stemserve.worker.capacity.workload import Demand
from stemserve.worker.config import ConfigError

RARE = 0.01  # share of calls that may be later than the latency asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    load: float  # share of what one GPU could answer
    gpus: int | None  # spares included; None: no number was asked for
    latency_s: float  # that 99 of 100 calls stay within at that load


def fleet(prediction: Prediction, demand: Demand) -> Fleet:
    """Raises ConfigError where no number of GPUs would do."""
    load = 1 - demand.headroom
    if demand.latency_s is not None:
        load = min(load, _load_within(prediction, demand.latency_s))
    calls = demand.calls_per_second(prediction.workload)
    if calls is None:
        return Fleet(load=load, gpus=None, latency_s=latency(prediction, load))
    working = math.ceil(calls / (load * prediction.calls_per_second) - 1e-9)
    load = calls / working / prediction.calls_per_second
    return Fleet(load=load, gpus=working + demand.spares, latency_s=latency(prediction, load))


def latency(prediction: Prediction, load: float) -> float:
    """That 99 of 100 calls stay within, as a queue of one server with random arrivals and sizes.

    M/M/1: P(wait > t) = load * exp(-(1 - load) * t / s). Calls of equal size wait half as long.
    """
    service = prediction.busy_s[prediction.limit]
    wait = service / (1 - load) * math.log(load / RARE) if load > RARE else 0.0
    return prediction.alone_s + wait


def _load_within(prediction: Prediction, latency_s: float) -> float:
    least = latency(prediction, 0.0)
    if latency_s <= least:
        raise ConfigError(
            f"a call alone takes {least * 1e3:.0f} ms: more GPUs cannot answer it within "
            f"{latency_s * 1e3:.0f} ms"
        )
    low, high = 0.0, 1 - 1e-6
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if latency(prediction, middle) <= latency_s else (low, middle)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one GPU."""

    total: int  # of which the server may take
    weights: int
    reserve: int  # for graphs, the largest step and libraries
    kv: int  # what is left
    kv_token: int

    @property
    def kv_tokens(self) -> int:
        return self.kv // self.kv_token


def memory(
    prediction: Prediction, *, utilization: float, reserve: int, kv_itemsize: int | None
) -> Memory:
    """Raises ConfigError where nothing is left for KV."""
    forward = prediction.forward
    total = int(forward.rates.memory_size * utilization)
    kv = total - forward.weight_bytes - reserve
    token = forward.kv_token_bytes(kv_itemsize)
    least = prediction.workload.prefix_tokens + prediction.workload.own_tokens
    if kv < least * token:
        raise ConfigError(
            f"a GPU has no room: of {total >> 30} GiB weights take {forward.weight_bytes >> 30} "
            f"and one call needs {least * token >> 20} MiB of KV"
        )
    return Memory(total=total, weights=forward.weight_bytes, reserve=reserve, kv=kv, kv_token=token)
