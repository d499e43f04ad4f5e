"""Models from a path: dummy weights, saved models, and what is no model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stemserve.worker.models.errors import ConfigError
from stemserve.worker.models.layers import Attend
from stemserve.worker.models.loader import LoadFormat, load_model, read_model_config
from stemserve.worker.models.transformer import Transformer


def logits_of(model: Transformer, attend: Attend) -> Tensor:
    return model.logits(model.hidden(torch.arange(50), torch.arange(50), attend))


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("LlamaForCausalLM", {"num_hidden_layers": 24, "attention_bias": True, "mlp_bias": True}),
        ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", {"head_dim": 16}),
        ("MistralForCausalLM", {}),
    ],
)
def test_dummy_weights_need_only_a_config_and_give_sane_logits(
    save_model: Any, causal_attend: Attend, tmp_path: Path, class_name: str, config: dict[str, int]
) -> None:
    save_model(class_name, **config)
    (tmp_path / "model.safetensors").unlink()
    model = load_model(tmp_path / "config.json", load_format=LoadFormat.DUMMY)
    logits = logits_of(model, causal_attend)
    assert 0.3 < logits.std() < 3
    assert logits.abs().max() < 20


def test_dummy_weights_are_the_same_every_time(
    save_model: Any, causal_attend: Attend, tmp_path: Path
) -> None:
    save_model("LlamaForCausalLM")
    first, second = (
        logits_of(load_model(tmp_path, load_format=LoadFormat.DUMMY), causal_attend)
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_dummy_classifiers_score(save_model: Any, causal_attend: Attend, tmp_path: Path) -> None:
    save_model("Qwen3ForSequenceClassification", head_dim=16, num_labels=3)
    model = load_model(tmp_path, load_format=LoadFormat.DUMMY, dtype=torch.bfloat16)
    scores = model.class_scores(model.hidden(torch.arange(9), torch.arange(9), causal_attend))
    assert (scores.shape, scores.dtype) == ((9, 3), torch.float32)
    assert scores.isfinite().all()


def test_a_config_of_a_saved_model_is_the_one_that_is_loaded(
    save_model: Any, tmp_path: Path
) -> None:
    save_model("LlamaForCausalLM")
    assert load_model(tmp_path).config == read_model_config(tmp_path)


def test_a_path_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json and 0 GGUF files"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        load_model(tmp_path / "model.bin")
