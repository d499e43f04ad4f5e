"""A model of one order of sums; in Triton's interpreter where there is no GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.worker.models.conftest import SaveModel
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.row_products import alike_rows

from stemserve.kernels.fused.logits import FEW_ROWS
from stemserve.worker.models.errors import ModelError
from stemserve.worker.models.fixed_triton_ops import FixedLmHead, FixedTritonOps, check_tiles
from stemserve.worker.models.loader import load_model
from stemserve.worker.models.transformer import Transformer

__all__ = ["alike_rows"]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")]


def own_token(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention in which every row sees itself alone."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def tiny(folder: Path, save_model: SaveModel, class_name: str, dtype: torch.dtype) -> Transformer:
    save_model(
        class_name,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        head_dim=16,
        vocab_size=130,
    )
    return load_model(folder, dtype=dtype, device=DEVICE, make_ops=FixedTritonOps)


@pytest.mark.parametrize("class_name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_row_has_the_same_bits_among_any_others(
    tmp_path: Path, save_model: SaveModel, class_name: str
) -> None:
    model = tiny(tmp_path, save_model, class_name, torch.float16)
    tokens, positions = (torch.randint(n, (40,), device=DEVICE) for n in (130, 256))
    whole = model.hidden(tokens, positions, own_token)
    for size in (1, 35):
        chosen = torch.randperm(40)[:size].to(DEVICE)
        part = model.hidden(tokens[chosen], positions[chosen], own_token)
        assert torch.equal(part, whole[chosen]), size


def test_it_agrees_with_the_plain_operations(tmp_path: Path, save_model: SaveModel) -> None:
    model = tiny(tmp_path, save_model, "Qwen3ForCausalLM", torch.float32)
    plain = load_model(tmp_path, dtype=torch.float32)
    tokens, positions = torch.randint(130, (9,)), torch.arange(9)
    found = model.hidden(tokens.to(DEVICE), positions.to(DEVICE), own_token).cpu()
    expected = plain.hidden(tokens, positions, own_token)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_rows_of_weights_that_no_tile_can_load_are_refused() -> None:
    with pytest.raises(ModelError, match="16 bytes"):
        check_tiles(torch.zeros(4, 7).half(), None, torch.float16)


@pytest.mark.parametrize(
    ("vocab", "width", "most"),
    [(130, 32, 40), pytest.param(151_936, 1024, 700, marks=ON_GPU)],
)
def test_a_row_of_the_head_has_the_same_bits_among_any_others(
    vocab: int, width: int, most: int
) -> None:
    weight = (torch.randn(vocab, width) / width**0.5).to(DEVICE, torch.float16)
    hidden = torch.randn(most, width).to(DEVICE, torch.float16)
    head = FixedLmHead(weight)
    rows, tokens = np.arange(most), torch.randint(vocab, (most,)).numpy()
    whole = head.gather(hidden, rows, tokens)
    likeliest = head.likeliest(hidden)
    for first, last in ((3, 4), (2, min(most - 1, 2 + FEW_ROWS.rows)), (1, most)):
        part = head.gather(hidden[first:last], rows[: last - first], tokens[first:last])
        assert torch.equal(part.logprobs, whole.logprobs[first:last])
        assert torch.equal(part.argmax, whole.argmax[first:last])
        drawn = head.likeliest(hidden[first:last])
        assert torch.equal(drawn.tokens, likeliest.tokens[first:last])
        assert torch.equal(drawn.logprobs, likeliest.logprobs[first:last])
    greedy = head.gather(hidden, rows[:0], tokens[:0])
    assert torch.equal(greedy.argmax, likeliest.tokens)
    assert torch.equal(greedy.likeliest, likeliest.logprobs)
