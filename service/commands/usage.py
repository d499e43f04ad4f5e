"""One line on what a call cost."""

from stemserve.proto.v1 import inference_pb2

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def usage_line(usage: inference_pb2.Usage, timing: inference_pb2.Timing) -> str:
    parts = [
        f"{usage.prompt_tokens} tokens: {usage.cached_tokens} cached, "
        f"{usage.shared_tokens} shared in the call, {usage.computed_tokens} computed"
    ]
    if usage.output_tokens:
        parts.append(f"{usage.output_tokens} generated")
    if usage.drafted_tokens:
        parts.append(f"{usage.accepted_tokens} of {usage.drafted_tokens} drafted tokens accepted")
    parts.append(f"{timing.total_seconds * 1e3:.1f} ms")
    parts.append(
        f"KV {readable_bytes(usage.kv_read_bytes)} read, "
        f"{readable_bytes(usage.kv_avoided_bytes)} avoided"
    )
    return "; ".join(parts)


def readable_bytes(count: float) -> str:
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
