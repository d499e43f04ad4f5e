"""The default model against transformers' own reading of the same file."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stemserve.worker.models.gguf_config import read_gguf_config
from stemserve.worker.models.gguf_file import GgufFile
from stemserve.worker.models.gguf_weights import GgufWeights
from stemserve.worker.models.layers import Attend
from stemserve.worker.models.loader import load_model

# "The capital of France is Paris.", then any ids, the first and the last of the vocabulary too
TOKEN_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 8713, 2430, 359, 9055, 2196, 30, 0, 49151, 17]
IS, PARIS = 4, 5


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> Any:
    """Built without any of our code: a config by hand, tensors by transformers."""
    config = LlamaConfig(
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
    model: Any = LlamaForCausalLM(config)
    reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    tensors = reader.load_gguf_checkpoint(
        str(default_model_path), return_tensors=True, model_to_load=model
    )["tensors"]
    outcome = model.load_state_dict(tensors, strict=False)
    assert (outcome.missing_keys, outcome.unexpected_keys) == (["lm_head.weight"], [])
    return model.eval()


def test_every_weight_is_the_one_that_transformers_reads(
    reference: Any, default_model_path: Path
) -> None:
    file = GgufFile(default_model_path)
    config, weights = read_gguf_config(file), GgufWeights(file)
    expected = dict(reference.named_parameters())
    assert sorted(weights.names()) == sorted(expected)
    for name in weights.names():
        assert torch.equal(weights.read(name, config), expected[name]), name


def test_logits_equal_those_of_transformers(
    reference: Any, default_model_path: Path, causal_attend: Attend
) -> None:
    model = load_model(default_model_path)
    positions = torch.arange(len(TOKEN_IDS))
    logits = model.logits(model.hidden(torch.tensor(TOKEN_IDS), positions, causal_attend))
    with torch.no_grad():
        expected = reference(torch.tensor([TOKEN_IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert int(logits[IS].argmax()) == TOKEN_IDS[PARIS]
    assert (model.config.context_tokens, model.config.eos_token_ids) == (8192, (2,))
