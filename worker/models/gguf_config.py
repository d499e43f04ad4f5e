"""Reads the description of a model from GGUF metadata."""

import torch

from stemserve.worker.models.config_fields import ConfigFields
from stemserve.worker.models.errors import ConfigError
from stemserve.worker.models.gguf_file import GgufFile
from stemserve.worker.models.model_config import Family, Head, ModelConfig, context_within
from stemserve.worker.models.rope import (
    FrequencyDivisors,
    LinearScaling,
    RopeConfig,
    RopeScaling,
)

_DIVISORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"
# By GGMLQuantizationType. What is quantised has fewer bits than bfloat16 anyway.
_FLOATS = {0: torch.float32, 1: torch.float16}


def read_gguf_config(file: GgufFile) -> ModelConfig:
    fields = ConfigFields(file.metadata, source=str(file.path))
    if fields.text("general.architecture", "") != "llama":
        raise fields.refuse(
            "general.architecture", "llama (Llama, Mistral, SmolLM2); other families as safetensors"
        )
    if "llama.expert_count" in fields and fields.count("llama.expert_count", minimum=0):
        raise fields.refuse("llama.expert_count", "0: mixtures of experts are not supported")
    hidden_size = fields.count("llama.embedding_length")
    query_heads = fields.count("llama.attention.head_count")
    head_dim = fields.count("llama.attention.key_length", hidden_size // query_heads)
    for name in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if fields.count(name, head_dim) != head_dim:
            raise fields.refuse(name, f"{head_dim}, the length of a key")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        family=Family.LLAMA,
        head=Head.LANGUAGE_MODEL,
        vocab_size=_vocab_size(file),
        context_tokens=_context_tokens(fields),
        num_layers=fields.count("llama.block_count"),
        hidden_size=hidden_size,
        query_heads=query_heads,
        kv_heads=fields.count("llama.attention.head_count_kv", query_heads),
        head_dim=head_dim,
        intermediate_size=fields.count("llama.feed_forward_length"),
        rope=RopeConfig(
            theta=fields.number("llama.rope.freq_base", 10_000.0),
            scaling=_rope_scaling(file, fields),
        ),
        rms_eps=fields.number("llama.attention.layer_norm_rms_epsilon"),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        tied_head="output.weight" not in file.tensors,
        bos_token_id=next(iter(fields.token_ids("tokenizer.ggml.bos_token_id")), None),
        eos_token_ids=fields.token_ids("tokenizer.ggml.eos_token_id")
        + fields.token_ids("tokenizer.ggml.eot_token_id"),
        checkpoint_dtype=_FLOATS.get(file.tensors[_EMBEDDING].type_id, torch.bfloat16),
    )


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path} has no matrix {_EMBEDDING}")
    return embedding.shape[0]


def _context_tokens(fields: ConfigFields) -> int:
    window = fields.count("llama.attention.sliding_window", 0, minimum=0)
    positions = fields.count("llama.context_length")
    return context_within(window or None, positions, source=fields.source)


def _rope_scaling(file: GgufFile, fields: ConfigFields) -> RopeScaling | None:
    if _DIVISORS in file.tensors:
        # Here, so that hosts that serve safetensors do without the gguf package.
        from stemserve.worker.models.gguf_weights import GgufWeights

        divisors = GgufWeights(file).read_raw(_DIVISORS)
        return FrequencyDivisors(divisors=tuple(float(d) for d in divisors))
    match fields.text("llama.rope.scaling.type", "none"):
        case "none":
            return None
        case "linear":
            return LinearScaling(factor=fields.number("llama.rope.scaling.factor"))
        case _:
            raise fields.refuse("llama.rope.scaling.type", "one of none, linear")
