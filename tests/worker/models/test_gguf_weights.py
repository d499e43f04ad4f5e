"""GGUF files written from transformers models, and damaged ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from stemserve.worker.models.errors import ConfigError, ModelError, WeightsError
from stemserve.worker.models.gguf_weights import hugging_face_name
from stemserve.worker.models.layers import Attend
from stemserve.worker.models.loader import load_model, read_model_config
from stemserve.worker.models.rope import LinearScaling

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}
Array = NDArray[np.float32]
Changes = Mapping[str, object]


def interleaved(rows: Array, heads: int) -> Array:
    """Rows of Q and K in the order of GGUF files."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    for ours, theirs in PARTS.items():
        name = name.replace(ours, theirs)
    return name


def metadata_of(config: Any) -> dict[str, object]:
    return {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "tokenizer.ggml.tokens": ["a", "b", "ü"],
        "tokenizer.ggml.scores": [0.5, 1.5],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
    }


def write_gguf(
    path: Path,
    reference: Any,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Changes | None = None,
    extra: Mapping[str, Array] | None = None,
) -> None:
    """Write a transformers model, and leave in it what the quantised weights stand for."""
    config = reference.config
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {**metadata_of(config), **(metadata or {})}.items():
        if value is not None:
            writer.add_key_value(key, value, *value_types(value))
    for name, parameter in reference.named_parameters():
        array = parameter.detach().numpy()
        tensor_kind = kind if array.ndim == 2 else GGMLQuantizationType.F32
        packed = gguf.quants.quantize(array, tensor_kind)
        parameter.data.copy_(torch.as_tensor(gguf.quants.dequantize(packed, tensor_kind)))
        if ".q_proj." in name:
            packed = interleaved(packed, config.num_attention_heads)
        if ".k_proj." in name:
            packed = interleaved(packed, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(packed), raw_dtype=tensor_kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def value_types(value: object) -> tuple[gguf.GGUFValueType, ...]:
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.get_type(value[0])
    if isinstance(value, int):
        return (gguf.GGUFValueType.UINT32,)
    return (gguf.GGUFValueType.get_type(value),)


def assert_same_logits(path: Path, reference: Any, attend: Attend) -> None:
    model = load_model(path, dtype=torch.float32)
    token_ids = torch.randint(97, (33,))
    with torch.no_grad():
        expected = reference(token_ids[None], use_cache=False).logits[0]
    logits: Tensor = model.logits(model.hidden(token_ids, torch.arange(33), attend))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
    + [("Q8_0", torch.bfloat16), ("Q4_1", torch.bfloat16)],
)
def test_weights_are_of_the_files_type_where_no_other_is_asked_for(
    save_model: Any, tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    write_gguf(
        tmp_path / "m.gguf", save_model("LlamaForCausalLM", **SIZES), GGMLQuantizationType[kind]
    )
    assert load_model(tmp_path / "m.gguf").dtype is dtype


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_the_dequantised_model(
    save_model: Any, causal_attend: Attend, tmp_path: Path, kind: str, tied: bool
) -> None:
    reference = save_model("LlamaForCausalLM", **SIZES, tie_word_embeddings=tied)
    path = tmp_path / "model.gguf"
    write_gguf(path, reference, GGMLQuantizationType[kind])
    assert_same_logits(path, reference, causal_attend)


def test_biases_and_wide_heads_are_read(
    save_model: Any, causal_attend: Attend, tmp_path: Path
) -> None:
    reference = save_model(
        "LlamaForCausalLM", **SIZES, head_dim=32, attention_bias=True, mlp_bias=True
    )
    write_gguf(tmp_path / "model.gguf", reference)
    assert_same_logits(tmp_path / "model.gguf", reference, causal_attend)


def test_frequency_divisors_are_applied(
    save_model: Any, causal_attend: Attend, tmp_path: Path
) -> None:
    reference = save_model("LlamaForCausalLM", **SIZES)
    divisors = np.random.default_rng(0).uniform(1, 8, 8).astype(np.float32)
    write_gguf(tmp_path / "model.gguf", reference, extra={"rope_freqs.weight": divisors})
    reference.model.rotary_emb.inv_freq /= torch.as_tensor(divisors)
    assert_same_logits(tmp_path / "model.gguf", reference, causal_attend)


def test_a_folder_with_one_gguf_file_is_that_file(save_model: Any, tmp_path: Path) -> None:
    reference = save_model("LlamaForCausalLM", **SIZES)
    folder = tmp_path / "folder"
    folder.mkdir()
    metadata = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "llama.attention.sliding_window": 100,
    }
    write_gguf(folder / "some.gguf", reference, metadata=metadata)
    config = read_model_config(folder)
    assert config.rope.scaling == LinearScaling(factor=2.0)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))
    assert (config.vocab_size, config.context_tokens) == (97, 100)
    (folder / "other.gguf").touch()
    with pytest.raises(ConfigError, match="2 GGUF files"):
        read_model_config(folder)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn.*expected one of none, linear"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8; expected 16"),
        ({"llama.block_count": None}, "llama.block_count is absent"),
        ({"llama.block_count": 2}, r"unexpected tensors: model\.layers\.2\."),
        ({"llama.block_count": 4}, r"missing tensors: model\.layers\.3\."),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    save_model: Any, tmp_path: Path, metadata: Changes, message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", save_model("LlamaForCausalLM", **SIZES), metadata=metadata)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path / "m.gguf")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="general.architecture is 'gemma3'; expected llama"):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("kept", "head", "message"),
    [
        (slice(4, None), b"GGML", "starts with b'GGML'"),
        (slice(8, None), b"GGUF\0\0\0\3", "little-endian"),
        (slice(0, 40), b"", "header is cut short"),
        (slice(0, -100), b"", "is cut short"),
        (slice(0, 0), b"", "cannot be read"),
    ],
)
def test_a_damaged_file_is_refused(
    save_model: Any, tmp_path: Path, kept: slice, head: bytes, message: str
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, save_model("LlamaForCausalLM", **SIZES))
    path.write_bytes(head + path.read_bytes()[kept])
    with pytest.raises(WeightsError, match=message):
        load_model(path)


def test_an_unknown_name_stays_as_it_is() -> None:
    assert hugging_face_name("blk.3.ffn_gate_exps.weight") == "blk.3.ffn_gate_exps.weight"
    assert hugging_face_name("blk.3.ffn_gate.weight") == "model.layers.3.mlp.gate_proj.weight"
