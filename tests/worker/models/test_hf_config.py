"""config.json of each family, old and new forms, and what is refused."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from stemserve.worker.models.errors import ConfigError
from stemserve.worker.models.hf_config import read_hf_config
from stemserve.worker.models.model_config import Head, ModelConfig
from stemserve.worker.models.rope import LinearScaling, Llama3Scaling, YarnScaling

BASE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 1000,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 300,
}
Read = Callable[..., ModelConfig]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_with(**fields: object) -> ModelConfig:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**BASE, **fields}))
        return read_hf_config(path)

    return read_with


def test_an_old_llama_config_needs_only_the_sizes(read: Read) -> None:
    config = read(torch_dtype="float16")
    assert (config.query_heads, config.kv_heads, config.head_dim) == (4, 4, 16)
    assert (config.rope.theta, config.rope.scaling, config.rms_eps) == (10_000.0, None, 1e-6)
    assert (config.head, config.has_lm_head) == (Head.LANGUAGE_MODEL, True)
    assert config.checkpoint_dtype == torch.float16
    assert config.heads.scale == 0.25


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_what_transformers_saves_is_read(family: str, tmp_path: Path) -> None:
    saved = getattr(transformers, f"{family}Config")(
        architectures=[f"{family}ForCausalLM"], num_key_value_heads=8, dtype="bfloat16"
    )
    saved.save_pretrained(tmp_path)
    config = read_hf_config(tmp_path / "config.json")
    assert config.head_dim == getattr(saved, "head_dim", 128)
    assert config.kv_heads == 8
    assert config.rope.theta == saved.rope_parameters["rope_theta"]
    assert config.vocab_size == saved.vocab_size
    assert config.checkpoint_dtype == torch.bfloat16


@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_both_forms_of_the_rope_settings_are_read(read: Read, table: str, kind: str) -> None:
    config = read(rope_theta=5e5, **{table: {kind: "linear", "factor": 2}})
    assert (config.rope.theta, config.rope.scaling) == (5e5, LinearScaling(factor=2.0))


def test_the_theta_of_rope_parameters_is_the_one_that_counts(read: Read) -> None:
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 7e5}).rope.theta == 7e5


def test_the_original_context_is_the_context_unless_it_is_given(read: Read) -> None:
    scaling = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    assert read(rope_scaling=scaling).rope.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=1000
    )
    yarn = read(rope_scaling={"type": "yarn", "original_max_position_embeddings": 250}).rope.scaling
    assert isinstance(yarn, YarnScaling)
    assert (yarn.factor, yarn.original_context_tokens) == (4.0, 250)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "Gemma.*expected one of.*Qwen3ForCausalLM"),
        ({"architectures": ["LlamaModel"]}, "LlamaModel.*expected one of"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected silu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8.*expected.*not quantised"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*expected one of"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope.*expected one of.*yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is absent; expected a number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "one rotary embedding"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1.0"),
        ({"vocab_size": None}, "vocab_size is None; expected a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"num_attention_heads": 5}, "hidden_size 64 is no multiple of 5 heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; expected a token id"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn.*expected one of"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    read: Read, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**fields)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_config_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_hf_config(path)


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_hf_config(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("fields", "context_tokens"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 200}, 200),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 5000}, 1000),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 1000),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 9999}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 200}, 1000),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 200,
                "use_sliding_window": True,
                "max_window_layers": 6,
            },
            1000,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 200,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            200,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 200,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            200,
        ),
        ({"sliding_window": 200}, 1000),
    ],
)
def test_the_context_ends_where_a_sliding_window_would_start_to_matter(
    read: Read,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, object],
    context_tokens: int,
) -> None:
    with caplog.at_level(logging.WARNING):
        config = read(**fields)
    assert config.context_tokens == context_tokens
    was_cut = context_tokens in (200, 4096)
    assert (f"to {context_tokens} tokens, the model's sliding window" in caplog.text) == was_cut


def test_labels_are_in_the_order_of_their_numbers(read: Read) -> None:
    labels = {str(i): f"label {i}" for i in reversed(range(12))}
    config = read(architectures=["Qwen3ForSequenceClassification"], id2label=labels)
    assert config.class_labels == tuple(f"label {i}" for i in range(12))
    assert not config.has_lm_head


def test_labels_without_names_are_numbered(read: Read) -> None:
    config = read(architectures=["LlamaForSequenceClassification"])
    assert config.class_labels == ("LABEL_0", "LABEL_1")


def test_labels_with_a_gap_are_refused(read: Read) -> None:
    with pytest.raises(ConfigError, match="id2label"):
        read(architectures=["LlamaForSequenceClassification"], id2label={"0": "a", "2": "b"})


def test_end_tokens_of_both_files_count(read: Read, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    assert read(eos_token_id=3).eos_token_ids == (3, 5)
    assert read(eos_token_id=None).eos_token_ids == (5, 3)
