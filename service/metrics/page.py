"""Write the tables of docs/metrics.md from the instruments: `make metrics-docs`."""

import sys
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric

from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.request import WorkerFacts

BEGIN = "<!-- begin of what `make metrics-docs` writes -->\n"
END = "<!-- end of what `make metrics-docs` writes -->\n"
MOST_VALUES = 12  # of a label, that are listed

EXAMPLE = WorkerFacts(
    model="...",
    architecture="...",
    dtype="...",
    device="...",
    vocab_size=1,
    context_tokens=1,
    layers=1,
    query_heads=1,
    kv_heads=1,
    head_dim=1,
    page_size=1,
    kv_pages=1,
    sampler_slots=1,
    steps_in_flight=1,
    has_lm_head=True,
    class_labels=(),
    kv_bytes_per_token=1,
    kv_dtype="...",
    torch_version="...",
    cuda_version="...",
)
FREE_LABELS = {  # values that are not known before a server runs
    "tenant": "the configured tenants, and `other` for all else",
    "version": "",
    "torch": "",
    "cuda": "",
    "model": "",
    "dtype": "",
    "device": "",
    "block_size": "",
    "num_gpu_blocks": "",
}


def families() -> list[Metric]:
    """Of a server without configured tenants, in the order of the code."""
    registry = CollectorRegistry()
    Metrics(registry).describe(EXAMPLE, "...")
    return list(registry.collect())


def exposed_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def series_names(family: Metric) -> set[str]:
    """As expressions may name them."""
    return {s.name for s in family.samples if not s.name.endswith("_created")}


def label_values(family: Metric) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            known = values.setdefault(label, [])
            if value not in known:
                known.append(value)
    return values


def page(text: str) -> str:
    """With new tables between its markers. Raises ValueError where there are none."""
    before, found, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found and found_end):
        raise ValueError("the page has no markers")
    return f"{before}{BEGIN}\n{_tables(families())}\n{END}{after}"


def _tables(every: Iterable[Metric]) -> str:
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    buckets: dict[str, list[str]] = {}
    for family in every:
        values = label_values(family)
        bounds = values.pop("le", None)
        if bounds:
            bounds_text = ", ".join(f"{float(bound):g}" for bound in bounds[:-1])
            buckets.setdefault(bounds_text, []).append(f"`{family.name}`")
        labels = "; ".join(_label(label, found) for label, found in values.items()) or "none"
        name = exposed_name(family)
        lines.append(f"| `{name}` | {family.type} | {labels} | {family.documentation} |")
    lines += ["", "Buckets (upper bounds; seconds where the name says so):", ""]
    lines += [f"* {', '.join(names)}: {bounds}" for bounds, names in buckets.items()]
    return "\n".join(lines) + "\n"


def _label(label: str, values: list[str]) -> str:
    if label in FREE_LABELS:
        known = FREE_LABELS[label]
        return f"`{label}`: {known}" if known else f"`{label}`"
    shown = [f"`{value}`" for value in values[:MOST_VALUES]]
    more = [f"and {len(values) - MOST_VALUES} more"] if len(values) > MOST_VALUES else []
    return f"`{label}`: {', '.join(shown + more)}"


def main() -> None:
    path = Path(sys.argv[1])
    path.write_text(page(path.read_text()))


if __name__ == "__main__":
    main()
