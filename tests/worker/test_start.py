"""From flags to a runner: defaults, refusals, costs."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.worker.plans import PlanBuilder
from tests.worker.tiny_model import COSTS, CPU, save_tiny_model
from transformers import LlamaConfig, LlamaForSequenceClassification

from stemserve.kernels.layout import HeadShape
from stemserve.kernels.pricing.cost_table_file import tables_json
from stemserve.kernels.strategy import Kernel
from stemserve.worker.blobs import decode_float32
from stemserve.worker.choice.costs import device_costs
from stemserve.worker.config import ConfigError, WorkerConfig, parse_config
from stemserve.worker.device_choice import check_page_size
from stemserve.worker.models.loader import LoadFormat
from stemserve.worker.start import Parts, make_parts

HEADS = HeadShape(query_heads=4, kv_heads=2, head_dim=8, scale=0.5)


@pytest.fixture(scope="module")
def costs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(tables_json([COSTS]))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_model(path, seed=1)
    return path


def config(folder: Path, *more: str) -> WorkerConfig:
    return parse_config(["--listen", "unix:/tmp/w.sock", "--model", str(folder), *more])


def parts(folder: Path, costs_file: Path, *more: str) -> Parts:
    flags = ("--kv-pages", "32", "--page-size", "4", "--cost-table", str(costs_file), *more)
    found = config(folder, "--device", "cpu", *flags)
    return make_parts(found, lambda done, total: None, lambda: None)


def test_a_deterministic_worker_says_so_and_takes_no_kernel(folder: Path, costs_file: Path) -> None:
    assert parts(folder, costs_file, "--deterministic").facts.deterministic
    assert not parts(folder, costs_file).facts.deterministic
    with pytest.raises(ConfigError, match="--deterministic has its own attention"):
        config(folder, "--deterministic", "--kernel", "naive")


@pytest.mark.parametrize(
    ("device", "size", "allowed"),
    [("cpu", 1025, "in 1 .. 1024"), ("cuda", 7, "one of 8, 16, 32, 64"), ("cuda", 128, "one of 8")],
)
def test_pages_of_a_size_that_no_kernel_takes_are_refused(
    device: str, size: int, allowed: str
) -> None:
    with pytest.raises(ConfigError, match=rf"--page-size {size} is not {allowed}"):
        check_page_size(size, torch.device(device))
    for taken in (8, 16, 32, 64):
        check_page_size(taken, torch.device(device))


def test_a_file_of_tls_that_is_not_there_is_named_before_the_model_is_loaded(
    folder: Path, costs_file: Path
) -> None:
    given = ["--listen", "127.0.0.1:0", "--model", str(folder)]
    given += ["--tls-private-key", str(costs_file), "--tls-certificate"]
    with pytest.raises(ConfigError, match="--tls-certificate /nowhere is not a file"):
        parse_config([*given, "/nowhere"])
    with pytest.raises(ConfigError, match="--tls-client-ca / is not a file"):
        parse_config([*given, str(costs_file), "--tls-client-ca", "/"])


def test_flags_have_the_documented_defaults(folder: Path) -> None:
    found = config(folder)
    assert (found.page_size, found.load_format, found.kernel) == (16, LoadFormat.AUTO, None)
    assert (found.kv_pages, found.kv_memory_bytes, found.parent_fd) == (None, None, None)
    assert found.unix_path == Path("/tmp/w.sock")


@pytest.mark.parametrize("kernel", [*Kernel])
def test_a_kernel_is_forced_by_its_name(folder: Path, kernel: Kernel) -> None:
    assert config(folder, "--kernel", kernel).kernel is kernel


@pytest.mark.parametrize(
    "flags",
    [
        ["--kernel", "fastest"],
        ["--kv-pages", "0"],
        ["--kv-pages", "5", "--kv-memory-bytes", "5"],
        ["--page-size", "x"],
        ["--dtype", "int8"],
        ["--gpu-memory-utilization", "0"],
        ["--gpu-memory-utilization", "1.1"],
        ["--no-such-flag"],
    ],
)
def test_bad_flags_end_with_code_2(
    folder: Path, flags: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        config(folder, *flags)
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_a_given_cost_table_is_scaled_to_the_models_heads(costs_file: Path, folder: Path) -> None:
    facts = parts(folder, costs_file).facts
    assert facts.query_heads == 4
    assert facts.cost_table_json == costs_file.read_text()


def test_a_table_of_other_libraries_is_taken_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "costs.json"
    here = torch.__version__.partition("+")[0]
    for version, told in ((f"{here}+cu999", False), ("1.0.0", True)):
        path.write_text(tables_json([replace(COSTS, libraries={"torch": version})]))
        with caplog.at_level(logging.INFO):
            device_costs(path, HEADS, torch.float32, CPU, lambda done, total: None)
        assert (f"measured with torch {version}" in caplog.text) is told


@pytest.mark.parametrize("text", ["", "{}", '{"format_version": 9}'])
def test_a_cost_table_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--cost-table .*costs.json"):
        device_costs(path, HEADS, torch.float32, CPU, lambda done, total: None)


def test_an_unknown_combination_is_measured_and_that_may_be_interrupted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Ended(Exception):
        pass

    def progress(done: int, total: int) -> None:
        if done == 1:
            raise Ended

    with caplog.at_level(logging.INFO), pytest.raises(Ended):
        device_costs(None, HEADS, torch.float64, CPU, progress)
    assert "no table for cpu with float64; measuring" in caplog.text


def test_a_classification_head_scores_the_rows_that_are_asked(
    tmp_path: Path, costs_file: Path
) -> None:
    torch.manual_seed(4)  # pyright: ignore[reportUnknownMemberType]
    described = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        initializer_range=0.4,
    )
    described.num_labels = 3
    oracle = LlamaForSequenceClassification(described)  # type: ignore[no-untyped-call]
    oracle.train(False)
    oracle.save_pretrained(tmp_path)  # pyright: ignore[reportUnknownMemberType]
    made = parts(tmp_path, costs_file)
    assert not made.facts.has_lm_head
    assert list(made.facts.class_labels) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    plan = PlanBuilder()
    prompts = [[5, 6, 7, 8, 9], [11, 12]]
    for number, prompt in enumerate(prompts):
        pages = [2 * number, 2 * number + 1][: -(-len(prompt) // 4)]
        row = plan.prefill(plan.node(len(prompt), pages), prompt)
        plan.classify.append(row + len(prompt) - 1)
    found = decode_float32("", made.runner.step(plan.build()).class_scores).reshape(2, 3)
    with torch.no_grad():
        expected = torch.cat([oracle(torch.tensor([prompt])).logits for prompt in prompts])
    assert abs(found - expected.numpy()).max() < 1e-4
