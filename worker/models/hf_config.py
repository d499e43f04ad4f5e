"""Reads the description of a model from a Hugging Face config.json."""

import json
from pathlib import Path
from typing import NamedTuple, cast

import torch

from stemserve.worker.models.config_fields import ConfigFields
from stemserve.worker.models.errors import ConfigError
from stemserve.worker.models.hf_rope_config import rope_from_hf
from stemserve.worker.models.model_config import Family, Head, ModelConfig, context_within

_FAMILIES = {
    "Llama": Family.LLAMA,
    "Qwen2": Family.QWEN2,
    "Qwen3": Family.QWEN3,
    "Mistral": Family.MISTRAL,
}
_HEADS = {
    "ForCausalLM": Head.LANGUAGE_MODEL,
    "ForSequenceClassification": Head.CLASSIFIER,
}
SUPPORTED_ARCHITECTURES = {
    family + head: (_FAMILIES[family], _HEADS[head]) for family in _FAMILIES for head in _HEADS
}
_DEFAULT_WINDOW = 4096
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class _Biases(NamedTuple):
    qkv: bool
    output: bool
    mlp: bool


def read_hf_config(path: Path) -> ModelConfig:
    """The model of a config.json; a generation_config.json beside it may add end tokens."""
    fields = _read_json(path)
    architecture = _architecture(fields)
    family, head = SUPPORTED_ARCHITECTURES[architecture]
    _refuse_unsupported(fields)
    hidden_size = fields.count("hidden_size")
    query_heads = fields.count("num_attention_heads")
    biases = _biases(fields, family)
    return ModelConfig(
        architecture=architecture,
        family=family,
        head=head,
        vocab_size=fields.count("vocab_size"),
        context_tokens=_context_tokens(fields, family),
        num_layers=fields.count("num_hidden_layers"),
        hidden_size=hidden_size,
        query_heads=query_heads,
        kv_heads=fields.count("num_key_value_heads", query_heads),
        head_dim=_head_dim(fields, family, hidden_size, query_heads),
        intermediate_size=fields.count("intermediate_size"),
        rope=rope_from_hf(fields),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        qkv_bias=biases.qkv,
        output_bias=biases.output,
        mlp_bias=biases.mlp,
        qk_norm=family is Family.QWEN3,
        tied_head=fields.flag("tie_word_embeddings", False),
        class_labels=_class_labels(fields) if head is Head.CLASSIFIER else (),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields, path.with_name("generation_config.json")),
        checkpoint_dtype=_dtype(fields),
    )


def _read_json(path: Path) -> ConfigFields:
    try:
        values: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return ConfigFields(cast("dict[str, object]", values), source=str(path))


def _architecture(fields: ConfigFields) -> str:
    found = fields.sequence("architectures")
    if len(found) == 1 and isinstance(found[0], str) and found[0] in SUPPORTED_ARCHITECTURES:
        return found[0]
    raise fields.refuse("architectures", f"one of {', '.join(SUPPORTED_ARCHITECTURES)}")


def _refuse_unsupported(fields: ConfigFields) -> None:
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.refuse("hidden_act", "silu")
    if "quantization_config" in fields:
        raise fields.refuse(
            "quantization_config", "a checkpoint that is not quantised, or a GGUF file"
        )


def _head_dim(fields: ConfigFields, family: Family, hidden_size: int, query_heads: int) -> int:
    if "head_dim" in fields:
        return fields.count("head_dim")
    if family is Family.QWEN3:
        return 128
    if hidden_size % query_heads:
        raise fields.refuse(
            "head_dim", f"a number: hidden_size {hidden_size} is no multiple of {query_heads} heads"
        )
    return hidden_size // query_heads


def _biases(fields: ConfigFields, family: Family) -> _Biases:
    attention = fields.flag("attention_bias", False)
    match family:
        case Family.LLAMA:
            return _Biases(attention, attention, fields.flag("mlp_bias", False))
        case Family.QWEN2:
            return _Biases(True, False, False)
        case Family.QWEN3:
            return _Biases(attention, attention, False)
        case Family.MISTRAL:
            return _Biases(False, False, False)


def _context_tokens(fields: ConfigFields, family: Family) -> int:
    positions = fields.count("max_position_embeddings")
    return context_within(_sliding_window(fields, family), positions, source=fields.source)


def _sliding_window(fields: ConfigFields, family: Family) -> int | None:
    """The window of the layers that have one. A sequence no longer than it is not affected."""
    if family is Family.LLAMA:
        return None
    if fields.mentions("sliding_window") and "sliding_window" not in fields:
        return None
    window = fields.count("sliding_window", _DEFAULT_WINDOW)
    if family is Family.MISTRAL:
        return window
    if not fields.flag("use_sliding_window", False):
        return None
    if "layer_types" in fields:
        return window if "sliding_attention" in fields.sequence("layer_types") else None
    full_layers = fields.count("max_window_layers", 28, minimum=0)
    return window if full_layers < fields.count("num_hidden_layers") else None


def _class_labels(fields: ConfigFields) -> tuple[str, ...]:
    labels = fields.table("id2label")
    if labels is None:
        return tuple(f"LABEL_{i}" for i in range(fields.count("num_labels", 2)))
    named = {index: labels.text(index) for index, _ in labels.items()}
    wanted = [str(i) for i in range(len(named))]
    if set(named) != set(wanted):
        raise fields.refuse("id2label", "a label for each of 0, 1, 2, ...")
    return tuple(named[index] for index in wanted)


def _eos_token_ids(fields: ConfigFields, generation_config: Path) -> tuple[int, ...]:
    """Those of both files: chat models name their end-of-turn token in either."""
    ids = fields.token_ids("eos_token_id")
    if generation_config.is_file():
        ids += _read_json(generation_config).token_ids("eos_token_id")
    return tuple(dict.fromkeys(ids))


def _dtype(fields: ConfigFields) -> torch.dtype | None:
    name = fields.text("dtype", fields.text("torch_dtype", ""))
    if not name:
        return None
    if name not in _DTYPES:
        raise ConfigError(f"{fields.source}: dtype is {name!r}; expected one of {list(_DTYPES)}")
    return _DTYPES[name]
