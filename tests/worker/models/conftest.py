"""Tiny random models saved to a folder, and plain causal attention."""

import random
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.nn.functional as F
from tests.reference_models import random_model
from torch import Tensor

from stemserve.worker.models.layers import Attend


class SaveModel(Protocol):
    """Makes a random model of a transformers class and saves it as safetensors."""

    def __call__(self, class_name: str, *, shard: str = "1GB", **config: object) -> Any: ...


@pytest.fixture(autouse=True)
def seed() -> int:
    """Fresh every run; a failing test shows it."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    torch.default_generator.manual_seed(seed)
    return seed


@pytest.fixture
def causal_attend() -> Attend:
    """Attention of one sequence over its own rows."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        heads = (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        query, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in heads)
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=True)
        return out.squeeze(0).transpose(0, 1)

    return attend


@pytest.fixture
def save_model(tmp_path: Path) -> SaveModel:
    def save(class_name: str, *, shard: str = "1GB", **config: object) -> Any:
        model = random_model(class_name, **config)
        model.save_pretrained(tmp_path, max_shard_size=shard)
        return model

    return save
