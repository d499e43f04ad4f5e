"""Reads the rotary embedding from a Hugging Face config.json, in its old or its new form."""

import math

from stemserve.worker.models.config_fields import ConfigFields
from stemserve.worker.models.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)


def rope_from_hf(fields: ConfigFields) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling`."""
    table = fields.table("rope_scaling") or fields.table("rope_parameters")
    theta = fields.number("rope_theta", 10_000.0)
    for place in (fields, table):
        if place is not None and place.number("partial_rotary_factor", 1.0) != 1.0:
            raise place.refuse("partial_rotary_factor", "1.0")
    if table is None:
        return RopeConfig(theta=theta)
    return RopeConfig(theta=table.number("rope_theta", theta), scaling=_scaling(fields, table))


def _scaling(fields: ConfigFields, table: ConfigFields) -> RopeScaling | None:
    key = "rope_type" if "rope_type" in table else "type"
    if key not in table and any(isinstance(value, dict) for _, value in table.items()):
        raise table.refuse("rope_type", "one rotary embedding for all layers")
    match table.text(key, "default"):
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=table.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=table.number("factor"),
                low_freq_factor=table.number("low_freq_factor"),
                high_freq_factor=table.number("high_freq_factor"),
                original_context_tokens=_original_context_tokens(fields, table),
            )
        case "yarn":
            return _yarn(fields, table)
        case _:
            raise table.refuse(key, "one of default, linear, llama3, yarn")


def _yarn(fields: ConfigFields, table: ConfigFields) -> YarnScaling:
    original = _original_context_tokens(fields, table)
    positions = fields.count("max_position_embeddings")
    factor = table.number("factor", positions / original)
    return YarnScaling(
        factor=factor,
        original_context_tokens=original,
        beta_fast=table.number("beta_fast", 32.0),
        beta_slow=table.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(table, factor),
        truncate=table.flag("truncate", True),
    )


def _yarn_attention_factor(table: ConfigFields, factor: float) -> float:
    if "attention_factor" in table:
        return table.number("attention_factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, all_dim = table.number("mscale", 0.0), table.number("mscale_all_dim", 0.0)
    return magnitude(scale) / magnitude(all_dim) if scale and all_dim else magnitude(1.0)


def _original_context_tokens(fields: ConfigFields, table: ConfigFields) -> int:
    name = "original_max_position_embeddings"
    if name in fields:
        return fields.count(name)
    return table.count(name, fields.count("max_position_embeddings"))
