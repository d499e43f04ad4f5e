"""The forward of each family, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stemserve.worker.models.errors import ModelError
from stemserve.worker.models.layers import Attend
from stemserve.worker.models.loader import load_model

TOKENS = 37
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, as many KV heads as query heads": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama, one KV head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama, three query heads a KV head": (
        "LlamaForCausalLM",
        {"num_attention_heads": 6, "num_key_value_heads": 2},
    ),
    "llama, wide heads": ("LlamaForCausalLM", {"head_dim": 32}),
    "llama, tied head": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, all biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, llama3 rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama, yarn rope": ("LlamaForCausalLM", {"rope_parameters": YARN_ROPE}),
    "llama, linear rope": ("LlamaForCausalLM", {"rope_parameters": LINEAR_ROPE}),
    "llama, one layer": ("LlamaForCausalLM", {"num_hidden_layers": 1}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, tied head": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3, biases and tied head": (
        "Qwen3ForCausalLM",
        {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralForCausalLM", {"head_dim": 12}),
    "mistral, rms eps": ("MistralForCausalLM", {"rms_norm_eps": 1e-2}),
}
CLASSIFIERS = [
    "LlamaForSequenceClassification",
    "Qwen2ForSequenceClassification",
    "Qwen3ForSequenceClassification",
    "MistralForSequenceClassification",
]


@pytest.fixture
def token_ids() -> Tensor:
    return torch.randint(97, (TOKENS,))


@pytest.mark.parametrize(("class_name", "config"), CASES.values(), ids=list(CASES))
def test_logits_equal_those_of_transformers(
    save_model: Any,
    causal_attend: Attend,
    token_ids: Tensor,
    tmp_path: Path,
    class_name: str,
    config: dict[str, object],
) -> None:
    reference = save_model(class_name, **config)
    model = load_model(tmp_path)
    logits = model.logits(model.hidden(token_ids, torch.arange(TOKENS), causal_attend))
    with torch.no_grad():
        expected = reference(token_ids[None], use_cache=False).logits[0]
    assert expected.std() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("class_name", CLASSIFIERS)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_class_scores_equal_those_of_transformers(
    save_model: Any,
    causal_attend: Attend,
    token_ids: Tensor,
    tmp_path: Path,
    class_name: str,
    num_labels: int,
) -> None:
    reference = save_model(class_name, num_labels=num_labels)
    model = load_model(tmp_path)
    last_row = torch.tensor([TOKENS - 1])
    hidden = model.hidden(token_ids, torch.arange(TOKENS), causal_attend, last_row)
    with torch.no_grad():
        expected = reference(token_ids[None], use_cache=False).logits
    torch.testing.assert_close(model.class_scores(hidden), expected, atol=1e-4, rtol=0)
    assert model.config.class_labels == tuple(reference.config.id2label.values())
    with pytest.raises(ModelError, match="no language-model head"):
        model.logits(hidden)


@pytest.mark.parametrize("kept", [[], [0], [36, 5, 5, 20], list(range(TOKENS))])
def test_kept_rows_are_the_rows_of_the_whole(
    save_model: Any, causal_attend: Attend, token_ids: Tensor, tmp_path: Path, kept: list[int]
) -> None:
    save_model("Qwen3ForCausalLM", head_dim=16)
    model = load_model(tmp_path)
    rows = torch.tensor(kept, dtype=torch.int32)
    positions = torch.arange(TOKENS)
    cut = model.hidden(token_ids, positions, causal_attend, rows)
    whole = model.hidden(token_ids, positions, causal_attend)
    torch.testing.assert_close(cut, whole[rows], atol=1e-5, rtol=0)


def test_attention_sees_all_rows_of_the_last_layer_even_if_few_are_kept(
    save_model: Any, causal_attend: Attend, token_ids: Tensor, tmp_path: Path
) -> None:
    save_model("LlamaForCausalLM")
    model = load_model(tmp_path)
    shapes: list[tuple[int, ...]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shapes.append((layer, *q.shape, *k.shape, *v.shape))
        return causal_attend(layer, q, k, v)

    model.hidden(token_ids, torch.arange(TOKENS), attend, torch.tensor([3]))
    assert shapes == [(layer, TOKENS, 4, 12, TOKENS, 2, 12, TOKENS, 2, 12) for layer in range(3)]


def test_positions_may_have_gaps(
    save_model: Any, causal_attend: Attend, token_ids: Tensor, tmp_path: Path
) -> None:
    reference = save_model("LlamaForCausalLM")
    model = load_model(tmp_path)
    positions = torch.randperm(256)[:TOKENS].sort().values.int()
    logits = model.logits(model.hidden(token_ids, positions, causal_attend))
    with torch.no_grad():
        # With a mask given, transformers does not take a gap for the start of another sequence.
        expected = reference(
            token_ids[None],
            attention_mask=torch.ones(1, TOKENS),
            position_ids=positions[None].long(),
            use_cache=False,
        ).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_bfloat16_loses_no_more_than_transformers_does(
    save_model: Any, causal_attend: Attend, token_ids: Tensor, tmp_path: Path
) -> None:
    reference = save_model("Qwen3ForCausalLM", head_dim=16, tie_word_embeddings=True)
    reference = reference.to(torch.bfloat16)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    logits = model.logits(model.hidden(token_ids, torch.arange(TOKENS), causal_attend))
    with torch.no_grad():
        lossy = reference(token_ids[None], use_cache=False).logits[0].float()
        exact = reference.float()(token_ids[None], use_cache=False).logits[0]
    assert (logits - exact).abs().mean() <= 1.25 * (lossy - exact).abs().mean()


def test_a_causal_model_has_no_class_scores(save_model: Any, tmp_path: Path) -> None:
    save_model("LlamaForCausalLM")
    model = load_model(tmp_path)
    assert model.has_lm_head
    with pytest.raises(ModelError, match="no classification head"):
        model.class_scores(torch.zeros(1, 48))
