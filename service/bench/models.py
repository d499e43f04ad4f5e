"""The shapes of the models that the baselines name, as a config.json for random weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Qwen3 model; bf16, one K/V row of a layer is 2 * kv_heads * head_dim values."""

    name: str  # of the folder, so of the model that a server says it has
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    intermediate: int
    tied: bool = True
    head_dim: int = 128
    vocab: int = 151_936
    context_tokens: int = 65_536

    @property
    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151_643,
            "eos_token_id": 151_645,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context_tokens,
            "max_window_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1_000_000,
            "sliding_window": None,
            "tie_word_embeddings": self.tied,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab,
        }

    def write(self, parent: Path) -> Path:
        """The folder with the config.json, named after the model."""
        folder = parent / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        return folder


SHAPES: Mapping[str, ModelShape] = {
    "0.6B": ModelShape(
        name="Qwen3-0.6B", layers=28, hidden=1024, query_heads=16, kv_heads=8, intermediate=3072
    ),
    "4B": ModelShape(
        name="Qwen3-4B", layers=36, hidden=2560, query_heads=32, kv_heads=8, intermediate=9728
    ),
}
