"""Rotary frequencies and rotation, against transformers."""

from importlib import import_module
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from stemserve.worker.models.config_fields import ConfigFields
from stemserve.worker.models.hf_rope_config import rope_from_hf
from stemserve.worker.models.rope import (
    FrequencyDivisors,
    RopeConfig,
    RotaryEmbedding,
    inverse_frequencies,
    rotate,
)

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.5,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: str(s["rope_type"]))
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_scaled_frequencies_equal_those_of_transformers(
    scaling: dict[str, Any], theta: float, head_dim: int
) -> None:
    parameters = {**scaling, "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=8 * head_dim,
        num_attention_heads=8,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    expected, expected_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    fields = ConfigFields(
        {"rope_parameters": parameters, "max_position_embeddings": 131072}, source="test"
    )
    rope = rope_from_hf(fields)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(expected_factor, rel=1e-12)


def test_divisors_divide_each_frequency() -> None:
    divisors = torch.rand(16) + 0.5
    scaled = RopeConfig(
        theta=1e4, scaling=FrequencyDivisors(divisors=tuple(float(d) for d in divisors))
    )
    plain = inverse_frequencies(RopeConfig(theta=1e4), 32)
    torch.testing.assert_close(inverse_frequencies(scaled, 32), plain / divisors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_that_of_transformers(dtype: torch.dtype) -> None:
    x = torch.randn(11, 3, 32, dtype=dtype)
    positions = torch.randint(4096, (11,))
    rotation = RotaryEmbedding(RopeConfig(theta=1e4), 32, torch.device("cpu")).rotation(positions)
    cos, sin = (torch.cat((half, half), -1).squeeze(1) for half in rotation)
    heads_first = x.float().transpose(0, 1)[None]
    llama: Any = import_module("transformers.models.llama.modeling_llama")
    expected, _ = llama.apply_rotary_pos_emb(heads_first, heads_first, cos[None], sin[None])
    rotated = rotate(x, rotation)
    assert rotated.dtype == dtype
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1).to(dtype))
