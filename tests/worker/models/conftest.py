"""Tiny random models made with transformers, and plain causal attention."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from stemserve.worker.models.layers import Attend


class SaveModel(Protocol):
    """Makes a random model of a transformers class and saves it as safetensors."""

    def __call__(self, class_name: str, *, shard: str = "1GB", **config: object) -> Any: ...


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def random_model(class_name: str, **config: object) -> Any:
    """Every parameter is random, norms and biases too, and logits are of order 1."""
    model_class: Callable[..., Any] = getattr(transformers, class_name)
    family = class_name.removesuffix("ForCausalLM").removesuffix("ForSequenceClassification")
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    model = model_class(getattr(transformers, f"{family}Config")(**{**sizes, **config})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            spread = 0.3 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
            parameter.normal_(mean, spread)
    return model
