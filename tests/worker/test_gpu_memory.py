"""A worker's memory on a GPU: what its cache gets, steps that do not fit, float8 pages."""

import gc
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.worker.plans import PlanBuilder

from stemserve.kernels.layout import Int32, int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32, encode_int32
from stemserve.worker.config import ConfigError, parse_config
from stemserve.worker.memory.trial_steps import prompt_step, trial_steps
from stemserve.worker.start import Parts, make_parts
from stemserve.worker.steps.checks import StepLimits
from stemserve.worker.steps.smaller_steps import launch

pytestmark = pytest.mark.gpu

VOCAB = 4096
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 8192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "float16",
}
MOST_ROWS = 16_384
FP8_RMS = 0.2  # of log-probabilities; about 0.05 with random weights


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def allowed(more: int) -> Generator[None]:
    """So many bytes more than are allocated."""
    total = torch.cuda.mem_get_info()[1]
    cuda: Any = torch.cuda  # partly untyped
    cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + more) / total)
    try:
        yield
    finally:
        cuda.set_per_process_memory_fraction(1.0)


def start(folder: Path, *flags: object) -> Parts:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = ["--listen", "unix:/tmp/w.sock", "--model", folder / "config.json"]
    words += ["--load-format", "dummy", "--no-cuda-graphs", "--max-step-tokens", MOST_ROWS]
    config = parse_config([str(word) for word in [*words, *flags]])
    return make_parts(config, lambda done, total: None, lambda: None)


def limits(parts: Parts, rows: int) -> StepLimits:
    facts = parts.facts
    return StepLimits(
        vocab_size=VOCAB,
        context_tokens=facts.context_tokens,
        page_size=facts.page_size,
        kv_pages=facts.kv_pages,
        sampler_slots=facts.sampler_slots,
        max_step_tokens=rows,
        has_lm_head=True,
        classes=0,
    )


def logprobs(result: worker_pb2.StepResult) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    assert not result.starved_rows and not result.failed_rows
    return decode_float32("", result.gather_logprobs)


def test_the_cache_gets_what_the_largest_steps_leave(tmp_path: Path) -> None:
    torch.cuda.reset_peak_memory_stats()
    parts = start(tmp_path, "--gpu-memory-utilization", 0.25)
    total = torch.cuda.mem_get_info()[1]
    pages = parts.facts.kv_pages * parts.facts.page_size * parts.facts.kv_bytes_per_token
    assert 0 < pages < 0.25 * total
    for plan in trial_steps(limits(parts, MOST_ROWS)):
        assert not launch(parts.runner, plan).result().memory_shortages
    assert torch.cuda.max_memory_allocated() < 0.25 * total


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu-memory-utilization", "0.001"], "no room.*--gpu-memory-utilization"),
        (["--kv-memory-bytes", str(1 << 45)], "not enough memory.*--gpu-memory-utilization"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_flags(
    tmp_path: Path, flags: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        start(tmp_path, *flags)


def test_steps_that_do_not_fit_beside_the_weights_are_an_error(tmp_path: Path) -> None:
    with allowed(1 << 30), pytest.raises(ConfigError, match=r"does not fit.*--max-step-tokens"):
        start(tmp_path, "--max-step-tokens", 100_000)


def test_a_step_that_does_not_fit_is_run_in_parts(tmp_path: Path) -> None:
    parts = start(tmp_path, "--kv-pages", 2000)
    plan = prompt_step(limits(parts, MOST_ROWS), int32([1024] * 16))
    tokens = np.random.default_rng(1).integers(0, VOCAB, MOST_ROWS)
    plan.token_ids = encode_int32(tokens)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    expected = launch(parts.runner, plan).result()
    needed = torch.cuda.max_memory_allocated() - held
    gc.collect()
    torch.cuda.empty_cache()
    with allowed(needed * 2 // 5):
        found = launch(parts.runner, plan).result()
    assert not expected.memory_shortages and found.memory_shortages
    assert abs(logprobs(found) - logprobs(expected)).max() < 0.02  # other shapes of products


def scores(parts: Parts, kernel: int, prefix: list[int], items: Int32) -> list[float]:
    """Of items behind a prefix that is in the pages, and of a decode row behind each."""
    size, length = len(prefix), items.shape[1]
    pages = range(-(-size // 16))
    plan = PlanBuilder(page_size=16)
    plan.prefill(plan.node(size, pages), prefix)
    parts.runner.step(plan.build())
    plan = PlanBuilder(page_size=16)
    node = plan.node(size, pages)
    for item in items.tolist():
        row = plan.item(node, item, kernel=kernel)
        for place in range(length - 1):
            plan.gather(row + place, [item[place + 1]])
    found = logprobs(parts.runner.step(plan.build())).tolist()
    plan = PlanBuilder(page_size=16)
    node = plan.node(size, pages)
    for number, item in enumerate(items.tolist()):
        leaf = plan.node(1, [pages.stop + number], node)
        plan.gather(plan.decode(leaf, item[0]), [item[1]])
    return [*found, *logprobs(parts.runner.step(plan.build())).tolist()]


def test_float8_pages_keep_their_bound_whatever_the_kernel(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    prefix = rng.integers(0, VOCAB, 1024).tolist()
    items = int32(rng.integers(0, VOCAB, (20, 24)))
    exact = scores(start(tmp_path, "--kv-pages", 200), 0, prefix, items)
    parts = start(tmp_path, "--kv-pages", 200, "--kv-cache-dtype", "fp8_e4m3")
    assert parts.facts.kv_dtype == "float8_e4m3fn"
    found = [scores(parts, kernel, prefix, items) for kernel in range(9)]
    lost = np.array(found[0]) - exact
    assert 0 < np.sqrt(np.square(lost).mean()) < FP8_RMS
    for other in found[1:]:
        # They differ in what float16 rounds, not in what they read.
        assert abs(np.array(other) - found[0]).max() < 0.05
