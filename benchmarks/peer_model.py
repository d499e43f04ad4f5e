"""Write the default model's GGUF file as a Hugging Face folder, without using the project's loader.

The peers read this folder, so that a fault of our loader shows as scores that differ.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from torch import Tensor

_SPECIAL_TOKEN_TYPE = 3
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_folder(gguf_file: Path) -> Path:
    """The folder beside `gguf_file` that the peers load; written once."""
    folder = gguf_file.with_suffix("").with_name(f"{gguf_file.stem}-hf")
    if not (folder / "model.safetensors").exists():
        folder.mkdir(exist_ok=True)
        reader = GGUFReader(gguf_file)
        _write_tokenizer(reader, folder)
        (folder / "config.json").write_text(json.dumps(_config(reader), indent=1))
        save_file(dict(_weights(reader)), folder / "model.safetensors", {"format": "pt"})
    return folder


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"the GGUF file has no {name}")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
    }


def _weights(reader: GGUFReader) -> Iterator[tuple[str, Tensor]]:
    heads = {
        "attn_q": _field(reader, "llama.attention.head_count"),
        "attn_k": _field(reader, "llama.attention.head_count_kv"),
    }
    for tensor in reader.tensors:
        weight = _dequantized(tensor)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in heads:
                weight = _half_split_rope(weight, heads[parts[2]])
            yield f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight", weight
        else:
            yield (
                {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
                + ".weight",
                weight,
            )


def _dequantized(tensor: ReaderTensor) -> Tensor:
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    return torch.from_numpy(values.reshape(tuple(int(n) for n in reversed(tensor.shape))))


def _half_split_rope(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the halves of a rotary head; Hugging Face has one after the other."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, rows // heads // 2, 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns).contiguous()


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == _SPECIAL_TOKEN_TYPE
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokens[_field(reader, "tokenizer.ggml.eos_token_id")]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
