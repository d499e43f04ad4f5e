"""Checkpoints in safetensors: what fills a model, and what is refused."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stemserve.worker.models.errors import WeightsError
from stemserve.worker.models.layers import Attend
from stemserve.worker.models.loader import load_model

FILE = "model.safetensors"
safetensors: Any = import_module("safetensors.torch")


def logits_of(folder: Path, attend: Attend) -> Tensor:
    model = load_model(folder)
    return model.logits(model.hidden(torch.arange(20), torch.arange(20), attend))


def edit(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a saved model."""
    tensors = {**safetensors.load_file(folder / FILE), **changes}
    safetensors.save_file({name: t for name, t in tensors.items() if t is not None}, folder / FILE)


def test_shards_are_read_as_one_file(
    save_model: Any, causal_attend: Attend, tmp_path: Path
) -> None:
    reference = save_model("LlamaForCausalLM", shard="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    with torch.no_grad():
        expected = reference(torch.arange(20)[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(tmp_path, causal_attend), expected, atol=1e-4, rtol=0)


def test_a_missing_shard_is_named(save_model: Any, tmp_path: Path) -> None:
    save_model("LlamaForCausalLM", shard="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightsError, match=shard.name):
        load_model(tmp_path)


def test_a_damaged_file_is_named(save_model: Any, tmp_path: Path) -> None:
    save_model("LlamaForCausalLM")
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:1000])
    with pytest.raises(WeightsError, match="not a readable safetensors file"):
        load_model(tmp_path)


def test_pickled_weights_are_refused(save_model: Any, tmp_path: Path) -> None:
    save_model("LlamaForCausalLM")
    (tmp_path / FILE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin.*safetensors and GGUF only"):
        load_model(tmp_path)


def test_missing_and_unexpected_tensors_are_named(save_model: Any, tmp_path: Path) -> None:
    save_model("LlamaForCausalLM")
    edit(tmp_path, {"model.norm.weight": None})
    edit(tmp_path, {"model.layers.1.self_attn.q_norm.weight": torch.ones(12)})
    with pytest.raises(
        WeightsError,
        match=r"missing tensors: model\.norm\.weight; unexpected .*layers\.1\.self_attn\.q_norm",
    ):
        load_model(tmp_path)


def test_a_long_list_of_wrong_names_is_cut(save_model: Any, tmp_path: Path) -> None:
    save_model("LlamaForCausalLM")
    edit(tmp_path, {f"extra.{i}": torch.ones(1) for i in range(20)})
    with pytest.raises(WeightsError, match="and 12 more"):
        load_model(tmp_path)


def test_stored_rotary_frequencies_are_ignored(
    save_model: Any, causal_attend: Attend, tmp_path: Path
) -> None:
    save_model("LlamaForCausalLM")
    before = logits_of(tmp_path, causal_attend)
    edit(tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    torch.testing.assert_close(logits_of(tmp_path, causal_attend), before)


@pytest.mark.parametrize("tensor", [torch.ones(47), torch.ones(48, dtype=torch.int8)])
def test_a_wrong_shape_or_type_is_named(save_model: Any, tmp_path: Path, tensor: Tensor) -> None:
    save_model("LlamaForCausalLM")
    edit(tmp_path, {"model.norm.weight": tensor})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is .*expected \(48,\)"):
        load_model(tmp_path)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_matrix_may_have_either_name(
    save_model: Any, causal_attend: Attend, tmp_path: Path, kept: str
) -> None:
    save_model("LlamaForCausalLM", tie_word_embeddings=True)
    before = logits_of(tmp_path, causal_attend)
    matrix = safetensors.load_file(tmp_path / FILE)["model.embed_tokens.weight"]
    edit(tmp_path, {"model.embed_tokens.weight": None, kept: matrix})
    torch.testing.assert_close(logits_of(tmp_path, causal_attend), before)


def test_a_tied_matrix_may_be_stored_twice(
    save_model: Any, causal_attend: Attend, tmp_path: Path
) -> None:
    save_model("LlamaForCausalLM", tie_word_embeddings=True)
    before = logits_of(tmp_path, causal_attend)
    edit(
        tmp_path,
        {"lm_head.weight": safetensors.load_file(tmp_path / FILE)["model.embed_tokens.weight"]},
    )
    torch.testing.assert_close(logits_of(tmp_path, causal_attend), before)


def test_two_different_matrices_are_not_tied(save_model: Any, tmp_path: Path) -> None:
    save_model("LlamaForCausalLM", tie_word_embeddings=True)
    edit(tmp_path, {"lm_head.weight": torch.ones(97, 48)})
    with pytest.raises(WeightsError, match="differ, but the config says tie_word_embeddings"):
        load_model(tmp_path)


def test_weights_keep_the_type_of_the_checkpoint_unless_another_is_asked(
    save_model: Any, tmp_path: Path
) -> None:
    reference = save_model("Qwen2ForCausalLM")
    reference.to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.bfloat16
    assert load_model(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_progress_goes_from_nothing_to_all(save_model: Any, tmp_path: Path) -> None:
    reference = save_model("LlamaForCausalLM")
    calls: list[tuple[int, int]] = []
    load_model(tmp_path, progress=lambda done, total: calls.append((done, total)))
    total = sum(parameter.numel() for parameter in reference.parameters())
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
