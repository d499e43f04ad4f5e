"""Models of transformers that ours are compared with."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers


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


def default_reference(path: Path) -> Any:
    """The default model without any of our code: a config by hand, tensors by transformers."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    tensors = reader.load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    outcome = model.load_state_dict(tensors["tensors"], strict=False)
    assert (outcome.missing_keys, outcome.unexpected_keys) == (["lm_head.weight"], [])
    return model.eval()
