"""Log-probabilities of chosen tokens, against float64.

Without a GPU the tests run in Triton's interpreter.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from stemserve.kernels.fused import reference as fused_reference
from stemserve.kernels.fused.logits import ChosenLogprobs, TileShape, chosen_logprobs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A GPU's matrix units add this many exact products to a running float32 sum at a time, and may lose
# a unit of its last place each time. Such losses have one sign: they add up.
PRODUCTS_A_STEP = 16
EPSILON = 2.0**-23
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL = TileShape(rows=16, tokens=32, depth=16, warps=4, stages=2)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(torch.seed()) % 2**31
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def random_head(rows: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(rows, width, device=DEVICE).to(dtype)
    weight = (torch.randn(vocab, width, device=DEVICE) * 3 * width**-0.5).to(dtype)
    return hidden, weight


def indices(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def largest_error(hidden: Tensor, weight: Tensor) -> float:
    """Of a log-probability: what a logit may lose, and the log-sum-exp in a few roundings."""
    steps = -(-hidden.shape[1] // PRODUCTS_A_STEP) + 6
    return steps * EPSILON * (hidden.double() @ weight.double().T).abs().max().item()


def check(
    hidden: Tensor, weight: Tensor, rows: Tensor, tokens: Tensor, shape: TileShape | None
) -> ChosenLogprobs:
    found = chosen_logprobs(hidden, weight, rows, tokens, shape)
    exact = fused_reference.logprobs(hidden, weight)
    error = largest_error(hidden, weight)
    errors = (found.logprobs - exact[rows, tokens]).abs()
    assert errors.max().item() < error
    assert errors.mean().item() < error / 4
    # Of two logits that float32 cannot tell apart either may be the largest.
    lead = exact.amax(1) - exact.gather(1, found.argmax[:, None]).squeeze(1)
    assert lead.max().item() < error
    assert (found.likeliest - exact.amax(1)).abs().max().item() < error
    assert found.lse.isfinite().all()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "vocab"), [(1, 16, 33), (17, 48, 97), (40, 24, 258)])
def test_chosen_tokens_equal_the_full_log_softmax(
    rng: np.random.Generator, rows: int, width: int, vocab: int, dtype: torch.dtype
) -> None:
    hidden, weight = random_head(rows, width, vocab, dtype)
    chosen = 3 * rows
    chosen_rows = indices(rng.integers(0, rows, chosen))
    chosen_tokens = indices(np.r_[0, vocab - 1, rng.integers(0, vocab, chosen - 2)])
    check(hidden, weight, chosen_rows, chosen_tokens, SMALL)
    check(hidden, weight, chosen_rows, chosen_tokens, None)


def test_rows_may_be_strided(rng: np.random.Generator) -> None:
    wide, weight = random_head(9, 64, 70, torch.float32)
    hidden = wide[:, 16:48]
    weight = weight[:, :32].contiguous()
    check(hidden, weight, indices(rng.permutation(9)), indices(rng.integers(0, 70, 9)), SMALL)


def test_equal_logits_give_the_lowest_token(rng: np.random.Generator) -> None:
    hidden = indices(rng.integers(0, 2, (8, 16))).float()
    weight = indices(rng.integers(0, 2, (100, 16))).float()
    found = chosen_logprobs(hidden, weight, indices([]), indices([]), SMALL)
    expected = [row.index(max(row)) for row in (hidden @ weight.T).cpu().numpy().tolist()]
    assert found.argmax.cpu().numpy().tolist() == expected


def test_a_certain_token_has_no_positive_log_probability() -> None:
    hidden, weight = random_head(4, 32, 64, torch.float32)
    weight[7] = hidden[2] * 40
    found = chosen_logprobs(hidden, weight, indices([2]), indices([7]), SMALL)
    assert -1e-3 < found.logprobs.item() <= 0.0


def test_rows_that_are_not_finite_show_and_harm_no_other() -> None:
    hidden, weight = random_head(6, 32, 64, torch.float32)
    weight[:, 0], hidden[:, 0] = 0.5, 0.0
    rows, tokens = indices(range(6)), indices([3] * 6)
    expected = chosen_logprobs(hidden, weight, rows, tokens, SMALL).logprobs
    hidden[1, 0], hidden[4, 0] = torch.nan, torch.inf
    with np.errstate(invalid="ignore"):
        found = chosen_logprobs(hidden, weight, rows, tokens, SMALL)
    assert found.lse.isfinite().cpu().numpy().tolist() == [True, False, True, True, False, True]
    assert found.logprobs.isnan().cpu().numpy().tolist() == [False, True, False, False, True, False]
    good = found.lse.isfinite()
    assert torch.equal(found.likeliest.isnan(), ~good)
    assert torch.equal(found.logprobs[good], expected[good])


def test_tokens_that_cannot_come_are_no_failure() -> None:
    """A whole tile of them, even."""
    hidden, weight = random_head(3, 16, 96, torch.float32)
    hidden[:, 0] = 1.0
    weight[:32, 0] = -torch.inf
    with np.errstate(invalid="ignore"):
        found = chosen_logprobs(hidden, weight, indices([0, 1]), indices([40, 5]), SMALL)
    exact = fused_reference.logprobs(hidden, weight)
    error = largest_error(hidden, weight[32:])
    assert abs(found.logprobs[0].item() - exact[0, 40].item()) < error
    assert found.logprobs[1].item() == -torch.inf
    assert found.lse.isfinite().all()


def test_no_rows_and_no_tokens() -> None:
    hidden, weight = random_head(2, 16, 40, torch.float32)
    found = chosen_logprobs(hidden, weight, indices([]), indices([]), SMALL)
    assert found.logprobs.shape == (0,) and found.lse.isfinite().all()
    found = chosen_logprobs(hidden[:0], weight, indices([]), indices([]), SMALL)
    assert found.argmax.shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(3, 1024), (64, 2560), (700, 1024)])
def test_a_vocabulary_of_real_size(
    rng: np.random.Generator, rows: int, width: int, dtype: torch.dtype
) -> None:
    vocab = 151_936
    hidden, weight = random_head(rows, width, vocab, dtype)
    chosen_rows = indices(rng.integers(0, rows, 2 * rows))
    chosen_tokens = indices(rng.integers(0, vocab, 2 * rows))
    check(hidden, weight, chosen_rows, chosen_tokens, None)


@pytest.mark.gpu
def test_a_captured_graph_reads_new_rows_and_tokens(rng: np.random.Generator) -> None:
    hidden, weight = random_head(50, 1024, 5000, torch.bfloat16)
    rows, tokens = indices([0] * 20), indices([0] * 20)
    chosen_logprobs(hidden, weight, rows, tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chosen_logprobs(hidden, weight, rows, tokens)
    hidden.copy_(torch.randn(50, 1024).bfloat16())
    rows.copy_(indices(rng.integers(0, 50, 20)))
    tokens.copy_(indices(rng.integers(0, 5000, 20)))
    graph.replay()
    expected = chosen_logprobs(hidden, weight, rows, tokens)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
