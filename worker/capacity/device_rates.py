"""What a device does beside attention, as measured; attention is priced by its cost table."""

from collections.abc import Mapping
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Of one GPU in a half type, and of the host beside it. All times in seconds."""

    product_flops: float  # a second, of matrix products of many rows
    memory_bytes: float  # a second
    weight_bytes: float  # a second, of products of few rows
    product_s: float  # of one product of few rows, beside the bytes of its weights
    pointwise_s: float  # at least, of a layer's norms, RoPE, gates and writes
    layer_host_s: float  # at least, of a layer whose attention the host launches
    call_s: float  # of the front end and its clients, of a call alone
    busy_call_s: float  # of the front end, of a call among others
    item_s: float  # of the front end, of each item beside
    step_host_s: float  # of the worker's host before the GPU starts a step
    stored_token_s: float  # beside it, of each stored token that the step reads
    burst_gap: float  # share of decode steps in which the GPU waits
    memory_size: int  # bytes


# benchmarks/results/h200/README.md, "Where the time goes": products of many rows and memory from
# the profile of 2048/64/100, the host's times from the table of single calls. docs/log.md, "decode
# graphs": products of few rows, a line through eight of them. What these predict is compared with
# what was measured in docs/capacity.md.
RATES: Mapping[str, DeviceRates] = {
    "nvidia-h200": DeviceRates(
        product_flops=770e12,
        memory_bytes=4.3e12,
        weight_bytes=3.7e12,
        product_s=4.3e-6,
        pointwise_s=7e-6,
        layer_host_s=101e-6,
        call_s=2.8e-3,
        busy_call_s=2.3e-3,
        item_s=1.0e-6,
        step_host_s=2.3e-3,
        stored_token_s=0.4e-6,
        burst_gap=0.04,
        memory_size=139 * GIB,
    ),
}
