"""The tensors of a model as the forward uses them, and how a checkpoint's tensors fill them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stemserve.worker.models.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [query + 2 * kv, hidden]
    qkv_bias: Tensor | None  # [query + 2 * kv]
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Tensor  # [hidden, query]
    output_bias: Tensor | None  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None  # [2 * intermediate]
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    embedding: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    lm_head: Tensor | None  # [vocab, hidden]; the embedding itself where the head is tied
    classifier: Tensor | None  # [classes, hidden]


def allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Room for the weights, not filled."""

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    embedding = room(config.vocab_size, config.hidden_size)
    lm_head = embedding if config.tied_head else room(config.vocab_size, config.hidden_size)
    return ModelWeights(
        embedding=embedding,
        layers=[_allocate_layer(config, dtype, device) for _ in range(config.num_layers)],
        norm=room(config.hidden_size),
        lm_head=lm_head if config.has_lm_head else None,
        classifier=None
        if config.has_lm_head
        else room(len(config.class_labels), config.hidden_size),
    )


def _allocate_layer(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LayerWeights:
    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    qkv_size = config.query_size + 2 * config.kv_size
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return LayerWeights(
        attention_norm=room(hidden),
        qkv=room(qkv_size, hidden),
        qkv_bias=room(qkv_size) if config.qkv_bias else None,
        q_norm=room(config.head_dim) if config.qk_norm else None,
        k_norm=room(config.head_dim) if config.qk_norm else None,
        output=room(hidden, config.query_size),
        output_bias=room(hidden) if config.output_bias else None,
        mlp_norm=room(hidden),
        gate_up=room(2 * intermediate, hidden),
        gate_up_bias=room(2 * intermediate) if config.mlp_bias else None,
        down=room(hidden, intermediate),
        down_bias=room(hidden) if config.mlp_bias else None,
    )


def checkpoint_slots(config: ModelConfig, weights: ModelWeights) -> dict[str, Tensor]:
    """For each tensor of a Hugging Face checkpoint, the part of a parameter that it fills."""
    slots = {EMBEDDING: weights.embedding, "model.norm.weight": weights.norm}
    if weights.lm_head is not None and not config.tied_head:
        slots[LM_HEAD] = weights.lm_head
    if weights.classifier is not None:
        slots["score.weight"] = weights.classifier
    for index, layer in enumerate(weights.layers):
        for name, slot in _layer_slots(config, layer):
            if slot is not None:
                slots[f"model.layers.{index}.{name}"] = slot
    return slots


def _layer_slots(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, Tensor | None]]:
    yield "input_layernorm.weight", layer.attention_norm
    yield "post_attention_layernorm.weight", layer.mlp_norm
    yield "self_attn.q_norm.weight", layer.q_norm
    yield "self_attn.k_norm.weight", layer.k_norm
    yield "self_attn.o_proj.weight", layer.output
    yield "self_attn.o_proj.bias", layer.output_bias
    yield "mlp.down_proj.weight", layer.down
    yield "mlp.down_proj.bias", layer.down_bias
    qkv = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}
    for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if fused is not None:
            parts = fused.split_with_sizes(list(qkv.values()))
            yield from ((f"self_attn.{p}_proj.{kind}", t) for p, t in zip(qkv, parts, strict=True))
    for kind, fused in (("weight", layer.gate_up), ("bias", layer.gate_up_bias)):
        if fused is not None:
            gate, up = fused.chunk(2)
            yield f"mlp.gate_proj.{kind}", gate
            yield f"mlp.up_proj.{kind}", up
