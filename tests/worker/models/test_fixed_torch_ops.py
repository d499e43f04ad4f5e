"""Operations in blocks of rows: right, and the same bits for a row among any others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.worker.models.conftest import SaveModel
from torch import Tensor

from stemserve.worker.models.errors import ModelError
from stemserve.worker.models.layers import Attend
from stemserve.worker.models.linear import DenseLinear
from stemserve.worker.models.loader import fixed_ops, load_model
from stemserve.worker.models.row_blocks import ROWS, by_blocks, check_places
from stemserve.worker.models.transformer import Transformer

FAMILIES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def own_token(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in which every row sees itself alone: rows have nothing to do with each other."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def rows_of(model: Transformer, tokens: Tensor, positions: Tensor) -> Tensor:
    hidden = model.hidden(tokens, positions, own_token)
    return torch.cat((hidden, model.logits(hidden)), 1)


@pytest.mark.parametrize("class_name", FAMILIES)
def test_a_model_of_blocks_agrees_with_a_plain_one(
    tmp_path: Path, save_model: SaveModel, causal_attend: Attend, class_name: str
) -> None:
    save_model(class_name, head_dim=16)
    tokens, positions = torch.randint(97, (45,)), torch.arange(45)
    found, expected = (
        load_model(tmp_path, make_ops=ops).hidden(tokens, positions, causal_attend)
        for ops in (fixed_ops, None)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("class_name", FAMILIES)
def test_a_row_has_the_same_bits_among_any_others(
    tmp_path: Path, save_model: SaveModel, class_name: str
) -> None:
    save_model(class_name)
    model = load_model(tmp_path, make_ops=fixed_ops)
    tokens, positions = torch.randint(97, (70,)), torch.randint(256, (70,))
    whole = rows_of(model, tokens, positions)
    for size in (1, 2, 5, ROWS, ROWS + 1, 69):
        chosen = torch.randperm(70)[:size]
        assert torch.equal(rows_of(model, tokens[chosen], positions[chosen]), whole[chosen]), size


def test_log_probabilities_of_a_row_have_the_same_bits_among_any_others(
    tmp_path: Path, save_model: SaveModel
) -> None:
    save_model("LlamaForCausalLM")
    model = load_model(tmp_path, make_ops=fixed_ops)
    hidden = torch.randn(40, 48)
    rows, ids = np.arange(40), torch.randint(97, (40,))
    whole = model.gather(hidden, rows, ids.numpy())
    for size in (1, 3, ROWS, 39):
        chosen = torch.randperm(40)[:size]
        part = model.gather(hidden[chosen], rows[:size], ids[chosen].numpy())
        assert torch.equal(part.logprobs, whole.logprobs[chosen])
        assert torch.equal(part.likeliest, whole.likeliest[chosen])
        assert torch.equal(part.argmax, whole.argmax[chosen])


def test_a_classifier_has_the_same_bits_among_any_others(
    tmp_path: Path, save_model: SaveModel
) -> None:
    save_model("LlamaForSequenceClassification", num_labels=3)
    model = load_model(tmp_path, make_ops=fixed_ops)
    hidden = torch.randn(20, 48)
    whole = model.class_scores(hidden)
    assert torch.equal(model.class_scores(hidden[7:8]), whole[7:8])


@pytest.mark.parametrize("count", [0, 1, ROWS, ROWS + 3])
def test_every_call_has_the_same_number_of_rows(count: int) -> None:
    seen: list[int] = []

    def doubled(first: Tensor, second: Tensor) -> Tensor:
        seen.append(len(first))
        assert first.is_contiguous()
        assert second.is_contiguous()
        return first + second

    x = torch.randn(count, 6)[:, 1:4]
    assert torch.equal(by_blocks(doubled, x, x), 2 * x)
    assert set(seen) == {ROWS}


class ByPlace(DenseLinear):
    """Rounds a row by its place, as some libraries do."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) * (1 + 1e-6 * (torch.arange(len(x)) % 6 > 3))[:, None]


def test_a_product_that_depends_on_places_is_refused() -> None:
    weight = torch.randn(12, 8)
    check_places(DenseLinear(weight), weight)
    with pytest.raises(ModelError, match="rounds a row by its place"):
        check_places(ByPlace(weight), weight)
