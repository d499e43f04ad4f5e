"""The default model against transformers' own reading of the same file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reference_models import default_reference

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
    return default_reference(default_model_path)


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
    model = load_model(default_model_path, dtype=torch.float32)
    positions = torch.arange(len(TOKEN_IDS))
    logits = model.logits(model.hidden(torch.tensor(TOKEN_IDS), positions, causal_attend))
    with torch.no_grad():
        expected = reference(torch.tensor([TOKEN_IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert int(logits[IS].argmax()) == TOKEN_IDS[PARIS]
    assert (model.config.context_tokens, model.config.eos_token_ids) == (8192, (2,))
