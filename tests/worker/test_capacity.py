"""Predictions of capacity: steps hold what calls compute, and numbers obey what must be true."""

import json
import math
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from stemserve.kernels.pricing.cost_table_file import of_dtype, shipped_cost_tables, table_for_heads
from stemserve.service.bench.models import SHAPES
from stemserve.worker.capacity.command import capacity
from stemserve.worker.capacity.device_rates import RATES
from stemserve.worker.capacity.fleet import fleet, latency, memory
from stemserve.worker.capacity.forward_seconds import ForwardSeconds
from stemserve.worker.capacity.planned_steps import decode_layout, planned_steps, prefill_layout
from stemserve.worker.capacity.prediction import Prediction
from stemserve.worker.capacity.workload import Demand, Workload
from stemserve.worker.config import ConfigError
from stemserve.worker.models.loader import read_model_config

H200 = "nvidia-h200"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPES["0.6B"].write(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def forward(folder: Path) -> ForwardSeconds:
    config = read_model_config(folder)
    tables = of_dtype(shipped_cost_tables(H200), "bfloat16")
    return ForwardSeconds(
        model=config,
        dtype=torch.bfloat16,
        rates=RATES[H200],
        costs=table_for_heads(tables, config.heads),
    )


def scores(**changes: Any) -> Workload:
    values: dict[str, Any] = {"prefix_tokens": 500, "items": 20, "item_tokens": 30} | changes
    return Workload(**values)


def prediction(forward: ForwardSeconds, workload: Workload) -> Prediction:
    return Prediction(forward=forward, workload=workload, step_rows=9216, decode_rows=64)


@pytest.mark.parametrize("number", range(8))
def test_steps_compute_every_token_once_and_hold_no_more_than_they_may(number: int) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed} of {number}")
    draw = random.Random(seed)
    rows = draw.choice([64, 300, 4096])
    work = scores(
        prefix_tokens=draw.randint(1, 900),
        items=draw.randint(1, 60),
        item_tokens=draw.randint(1, 40),
        hit_rate=draw.choice([0.0, 0.5, 1.0]),
        token_logprobs=draw.random() < 0.5,
    )
    calls = draw.randint(1, 6)
    steps = planned_steps(work, calls, rows)
    misses = calls - round(calls * work.hit_rate)
    computed = misses * work.prefix_tokens + (calls - misses) * work.token_logprobs
    items = calls * work.items
    assert sum(tree.items for step in steps for tree in step) == items
    total = sum(tree.rows for step in steps for tree in step)
    assert total == computed + items * work.item_tokens
    for step in steps:
        layout = prefill_layout(step)
        assert layout.num_rows == sum(tree.rows for tree in step) <= rows
        assert (layout.chain_tokens <= work.prefix_tokens).all()


def test_a_decode_step_has_a_row_for_each_sample_below_its_prompt() -> None:
    work = Workload(prefix_tokens=100, samples=4, new_tokens=60)
    layout = decode_layout(work, 10)
    assert set(layout.chain_tokens) == {100 + 30}
    assert layout.num_rows == 10 and (layout.segment_rows == 1).all()
    below = Counter[int](layout.node_parent[layout.segment_node].tolist())
    assert below == {0: 4, 1: 4, 2: 2}


def test_weights_are_counted_as_they_are_loaded(tmp_path: Path) -> None:
    config_file = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": 100, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e4,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config_file))
    config = read_model_config(tmp_path)
    found = ForwardSeconds(
        model=config,
        dtype=torch.bfloat16,
        rates=RATES[H200],
        costs=table_for_heads(of_dtype(shipped_cost_tables(H200), "bfloat16"), config.heads),
    )
    hidden, qkv, inner = 32, 32 + 2 * 16, 48
    layer = hidden * qkv + 32 * hidden + 3 * hidden * inner + 2 * hidden + 2 * 8
    assert found.weight_bytes == 2 * (100 * hidden + 2 * layer + hidden)
    assert found.kv_token_bytes() == 2 * 2 * 2 * 8 * 2


def test_more_work_takes_longer_and_a_cached_prefix_less(forward: ForwardSeconds) -> None:
    usual = prediction(forward, scores())
    for more in ({"items": 200}, {"prefix_tokens": 5000}, {"item_tokens": 300}):
        assert prediction(forward, scores(**more)).alone_s > usual.alone_s
    cached = prediction(forward, scores(prefix_tokens=5000, hit_rate=1.0))
    new = prediction(forward, scores(prefix_tokens=5000))
    assert cached.calls_per_second > new.calls_per_second


def test_small_calls_are_limited_by_the_front_end_and_large_ones_by_the_gpu(
    forward: ForwardSeconds,
) -> None:
    assert prediction(forward, scores()).limit == "front end"
    assert prediction(forward, scores(items=500, item_tokens=100)).limit == "GPU"


def test_a_fleet_meets_the_demand_and_one_gpu_less_would_not(forward: ForwardSeconds) -> None:
    found = prediction(forward, scores(items=500))
    demand = Demand(per_second=200_000, unit="items", latency_s=0.5, spares=2)
    answer = fleet(found, demand)
    assert answer.gpus is not None
    calls = 200_000 / 500
    working = answer.gpus - 2
    assert answer.latency_s <= 0.5
    assert calls / working / found.calls_per_second == pytest.approx(answer.load)
    fewer = calls / (working - 1) / found.calls_per_second
    assert fewer > 1 - demand.headroom or latency(found, fewer) > 0.5


def test_the_99th_of_a_hundred_waits_as_in_a_simulated_queue(forward: ForwardSeconds) -> None:
    """Random arrivals and sizes, one server."""
    found, load = prediction(forward, scores(items=500)), 0.7
    service = found.busy_s[found.limit]
    draw = random.Random(7)
    waits, wait = list[float](), 0.0
    for _ in range(200_000):
        waits.append(wait)
        wait = max(0.0, wait + draw.expovariate(1 / service) - draw.expovariate(load / service))
    simulated = sorted(waits)[int(0.99 * len(waits))]
    assert latency(found, load) - found.alone_s == pytest.approx(simulated, rel=0.15)


def test_memory_is_divided_and_fp8_holds_twice_the_tokens(forward: ForwardSeconds) -> None:
    found = prediction(forward, scores())
    usual = memory(found, utilization=0.9, reserve=4 << 30, kv_itemsize=None)
    assert usual.weights + usual.reserve + usual.kv == usual.total
    assert usual.kv_token == 2 * 28 * 8 * 128 * 2
    halved = memory(found, utilization=0.9, reserve=4 << 30, kv_itemsize=1)
    assert halved.kv_tokens == pytest.approx(2 * usual.kv_tokens, abs=2)


WRONG: dict[str, tuple[list[str], str]] = {
    "no calls": ([], "--items"),
    "both kinds": (["--items=2", "--item-tokens=3", "--samples=2"], "--items"),
    "no size": (["--items=2"], "--item-tokens"),
    "hit rate": (["--items=2", "--item-tokens=3", "--hit-rate=2"], "--hit-rate"),
    "too fast": (["--items=2", "--item-tokens=3", "--latency-ms=1"], "alone takes"),
    "other unit": (["--items=2", "--item-tokens=3", "--tokens-per-second=9"], "no tokens"),
    "two units": (
        ["--items=2", "--item-tokens=3", "--calls-per-second=1", "--items-per-second=1"],
        "give one of",
    ),
    "no memory": (["--items=2", "--item-tokens=3", "--memory-gib=5"], "no room"),
    "headroom": (["--items=2", "--item-tokens=3", "--headroom=1"], "--headroom"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_answered_is_refused_by_name(case: str, folder: Path) -> None:
    words, named = WRONG[case]
    with pytest.raises(ConfigError, match=named):
        capacity(["--model", str(folder), "--prefix-tokens=100", *words])


@pytest.mark.parametrize(
    "word", ["--latency-ms=nan", "--memory-gib=inf", "--items-per-second=1e300", "--items=9999999"]
)
def test_numbers_that_mean_nothing_are_refused(
    word: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        capacity(
            ["--model", str(folder), "--prefix-tokens=9", "--items=2", "--item-tokens=3", word]
        )
    assert word.partition("=")[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_table_of_a_cpu_cannot_tell(folder: Path, tmp_path: Path) -> None:
    tables = Path(shipped_cost_tables.__code__.co_filename).parents[1] / "costs/cpu.json"
    words = ["--prefix-tokens=100", "--items=2", "--item-tokens=3", f"--cost-table={tables}"]
    with pytest.raises(ConfigError, match="stemserve calibrate"):
        capacity(["--model", str(folder), *words])


@pytest.mark.parametrize(
    "words",
    [
        ["--items=100", "--item-tokens=64", "--items-per-second=50000", "--latency-ms=200"],
        ["--samples=16", "--new-tokens=256", "--tokens-per-second=100000"],
        ["--items=5", "--item-tokens=20", "--token-logprobs"],
    ],
)
def test_text_and_json_say_the_same(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", str(folder), "--prefix-tokens=2048", "--hit-rate=0.5", *words]
    assert capacity([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert capacity(given) == 0
    text = capsys.readouterr().out
    assert f"at most {found['calls_per_second']:,.1f} calls/s" in text
    assert f"the {found['limit']} is the limit" in text
    assert (found["gpus"] is None) == ("GPUs," not in text)
    if found["gpus"]:
        assert f"{found['gpus']} GPUs, 1 of them spare" in text
    assert all(math.isfinite(value) for value in found["gpu_s"].values())


def test_the_command_line_passes_options_on(folder: Path) -> None:
    command = [sys.executable, "-c", "from stemserve.service.cli import main; main()", "capacity"]
    command += ["--model", str(folder), "--prefix-tokens=2048", "--items=100", "--item-tokens=64"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["limit"] == "GPU"
    done = subprocess.run([*command, "--hit-rate=7"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--hit-rate must be from 0 to 1" in done.stderr
