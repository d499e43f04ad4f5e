"""Draws on the device, against the CPU's sampler and float64 distributions.

Weights are float32 on both sides, with other roundings: tokens are equal unless the random number
lies within TOLERANCE of where two tokens meet. Without a GPU the tests run in Triton's interpreter,
most of them with small tiles, so that few tokens make many.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("triton")

from stemserve.kernels.host_array import device_tensor, index_tensor
from stemserve.kernels.sampling.draw import FASTEST, DrawShape, draw_tokens
from stemserve.kernels.sampling.slot_tables import SLOT, DrawnTokens, SlotTables
from stemserve.worker.sampling.uniform import uniform

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
TOLERANCE = 2e-6
SMALL = DrawShape(width=8, blocks=4, picks=4, scan=16, room=8, candidates=16, warps=4)
MEDIUM = DrawShape(width=16, blocks=8, picks=16, scan=64, room=16, candidates=128, warps=4)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(torch.seed()) % 2**31
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def random_params(rng: np.random.Generator, vocab: int) -> Params:
    return Params(
        temperature=float(np.float32(rng.choice([0.0, 0.3, 1.0, 2.5]))),
        top_k=int(rng.choice([0, 0, 1, 3, min(vocab, 400), vocab // 3])),
        top_p=float(rng.choice([1.0, 0.999, 0.9, 0.5, 0.05])),
        min_p=float(np.float32(rng.choice([0.0, 0.0, 0.3, 0.01]))),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
    )


def table_of(params: Sequence[Params], slots: int) -> SlotTables:
    tables = SlotTables(slots, DEVICE)
    packed = np.zeros(len(params), SLOT)
    for row, p in zip(packed, params, strict=True):
        row["temperature"], row["top_k"], row["top_p"] = p.temperature, p.top_k, p.top_p
        row["min_p"], row["seed"] = p.min_p, p.seed
    tables.admit(np.arange(len(params)), packed)
    return tables


def draw(
    logits: NDArray[np.float32],
    params: Sequence[Params],
    index: NDArray[np.int64] | None = None,
    shape: DrawShape = FASTEST,
) -> DrawnTokens:
    rows = len(logits)
    found = draw_tokens(
        device_tensor(logits, DEVICE),
        table_of(params, rows),
        index_tensor(np.arange(rows), DEVICE),
        index_tensor(np.zeros(rows, np.int64) if index is None else index, DEVICE),
        shape,
    )
    return DrawnTokens(*(tensor.cpu() for tensor in found))


def tokens_of(found: DrawnTokens) -> list[int]:
    tokens: list[int] = found.tokens.numpy().tolist()
    return tokens


def allowed(logits: NDArray[np.float32], params: Params) -> tuple[NDArray[np.float64], float]:
    """A row's probabilities, and how much of them rounding may move over a limit."""
    scaled = (logits.astype(np.float64) - logits.max()) / params.temperature
    order = np.argsort(-logits, kind="stable")
    p: NDArray[np.float64] = np.exp(scaled)
    doubt = 0.0
    if params.top_k:
        p[order[params.top_k :]] = 0
    total = p.sum()
    if params.top_p < 1:
        cumulated = np.cumsum(p[order]) / total
        count = int((cumulated < params.top_p).sum()) + 1
        near = np.abs(cumulated - params.top_p) < TOLERANCE
        doubt += float(
            p[order][near].sum() + (p[order[min(count, len(p) - 1)]] if near.any() else 0)
        )
        p[order[count:]] = 0
    doubt += float(p[np.abs(p - params.min_p) < TOLERANCE].sum())
    p[p < params.min_p] = 0
    return p / p.sum(), doubt / float(p.sum())


def check(
    logits: NDArray[np.float32],
    params: Sequence[Params],
    index: NDArray[np.int64],
    found: DrawnTokens,
) -> None:
    assert not found.failed.any()
    exact = device_tensor(logits, CPU).double().log_softmax(-1)
    assert (found.logprobs - exact.gather(1, found.tokens[:, None])[:, 0]).abs().max() < 2e-5
    for row, p in enumerate(params):
        token = int(found.tokens[row])
        if p.temperature <= 1e-5:
            assert token == int(logits[row].argmax())
            continue
        probabilities, doubt = allowed(logits[row], p)
        u = uniform(np.array([p.seed], np.uint64), index[row : row + 1].astype(np.uint64))[0]
        below, upto = probabilities[:token].sum(), probabilities[: token + 1].sum()
        assert probabilities[token] > 0 or doubt > 0, (row, p)
        assert below - TOLERANCE - doubt <= u <= upto + TOLERANCE + doubt, (row, p)


@pytest.mark.parametrize("shape", [SMALL, MEDIUM, FASTEST], ids=["small", "medium", "fastest"])
@pytest.mark.parametrize("vocab", [5, 97])
@pytest.mark.parametrize("kind", ["random", "ties", "equal"])
def test_a_draw_is_the_inverse_of_the_cumulated_distribution(
    rng: np.random.Generator, shape: DrawShape, vocab: int, kind: str
) -> None:
    rows = 6
    logits = rng.normal(0, 2, (rows, vocab)).astype(np.float32)
    logits = {"random": logits, "ties": np.round(logits), "equal": logits * 0}[kind]
    params = [random_params(rng, vocab) for _ in range(rows)]
    index = rng.integers(0, 2**31, rows)
    check(logits, params, index, draw(logits, params, index, shape))


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [32_003, 49_152, 151_936])
@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0, 6.0])
def test_a_vocabulary_of_real_size(rng: np.random.Generator, vocab: int, spread: float) -> None:
    rows = 32
    logits = rng.normal(0, spread, (rows, vocab)).astype(np.float32)
    params = [random_params(rng, vocab) for _ in range(rows)]
    index = rng.integers(0, 2**31, rows)
    check(logits, params, index, draw(logits, params, index))


def test_a_row_without_a_finite_choice_fails_alone(rng: np.random.Generator) -> None:
    logits = rng.normal(0, 2, (12, 90)).astype(np.float32)
    params = [random_params(rng, 90) for _ in range(12)]
    params[1] = params[4] = Params()
    index = np.arange(12)
    expected = draw(logits, params, index, SMALL)
    bad = np.array([1, 3, 4, 6, 8, 10])
    logits[[1, 6], 40], logits[[3, 4], 7], logits[8], logits[10] = np.nan, np.inf, -np.inf, np.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        found = draw(logits, params, index, SMALL)
    good = np.setdiff1d(index, bad)
    assert found.failed.numpy().nonzero()[0].tolist() == bad.tolist()
    for before, after in zip(expected, found, strict=True):
        assert torch.equal(before[good], after[good])
    assert (found.tokens >= 0).all() and (found.tokens < 90).all()


@pytest.mark.parametrize("shape", [SMALL, FASTEST], ids=["small", "fastest"])
def test_a_draw_does_not_depend_on_the_batch(rng: np.random.Generator, shape: DrawShape) -> None:
    vocab = 5003 if shape is FASTEST else 203
    logits = rng.normal(0, 1, (5, vocab)).astype(np.float32)
    params = [random_params(rng, vocab) for _ in range(5)]
    index = rng.integers(0, 2**31, 5)
    together = draw(logits, params, index, shape)
    order = rng.permutation(np.arange(5))
    moved = draw(logits[order], [params[int(i)] for i in order], index[order], shape)
    for a, b in zip(together, moved, strict=True):
        assert torch.equal(a[device_tensor(order, CPU)], b)
    alone = draw(logits[3:4], params[3:4], index[3:4], shape)
    assert all(torch.equal(a[3:4], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_allowed_token_is_the_likeliest(rng: np.random.Generator, temperature: float) -> None:
    logits = np.round(rng.normal(0, 1, (9, 70)) * 2).astype(np.float32)  # ties
    limits = [Params(top_k=1), Params(top_p=1e-9), Params(min_p=1.0, top_k=1)]
    params = [replace(limits[i % 3], temperature=temperature, seed=i) for i in range(9)]
    assert tokens_of(draw(logits, params, shape=SMALL)) == logits.argmax(1).tolist()


def test_a_min_p_of_one_leaves_all_of_the_likeliest() -> None:
    logits = np.zeros((20, 40), np.float32)
    logits[:, [3, 8, 30]] = 2.0
    found = draw(logits, [Params(min_p=1.0, seed=i) for i in range(20)], shape=SMALL)
    assert set(tokens_of(found)) == {3, 8, 30}


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (Params(top_k=3, temperature=9.0), [0, 1, 36]),
        (Params(top_p=0.075), [0, 1, 2]),
        (Params(top_k=20, top_p=0.15), [0, 1, 2]),
    ],
    ids=["top_k", "top_p", "both"],
)
def test_ties_at_the_edge_keep_the_lowest_ids(params: Params, kept: list[int]) -> None:
    logits = np.zeros((14, 40), np.float32)
    logits[:, 36] = 36 in kept
    found = draw(logits, [replace(params, seed=i) for i in range(14)], shape=SMALL)
    assert set(tokens_of(found)) == set(kept)


@pytest.mark.gpu
def test_frequencies_follow_the_distribution() -> None:
    rows = 4000
    logits = np.array([2.0, 1.0, 0.0, -1.0, 0.5], np.float32)
    params = Params(temperature=0.7, seed=99, top_k=4)
    found = draw(np.tile(logits, (rows, 1)), [params] * rows, np.arange(rows), SMALL)
    counts = np.bincount(found.tokens.numpy(), minlength=5)
    expected = allowed(logits, params)[0] * rows
    likely = expected > 0
    assert counts[~likely].sum() == 0
    assert ((counts - expected)[likely] ** 2 / expected[likely]).sum() < 16.3  # 99.9 % of 3 degrees


def test_strided_rows_and_last_tokens(rng: np.random.Generator) -> None:
    wide = rng.normal(0, 2, (6, 64)).astype(np.float32)
    tables = table_of([Params(seed=i) for i in range(9)], 9)
    slots, index = index_tensor(np.array([8, 2, 5, 0, 9, 9]), DEVICE), torch.arange(6).to(DEVICE)
    tables.last_token.fill_(77)
    found = draw_tokens(device_tensor(wide, DEVICE)[:, 8:48], tables, slots, index, SMALL)
    dense = draw_tokens(device_tensor(wide[:, 8:48], DEVICE), tables, slots, index, SMALL)
    assert all(torch.equal(a, b) for a, b in zip(found, dense, strict=True))
    expected = [77] * 9
    for slot, token in zip([8, 2, 5, 0], found.tokens.cpu().numpy().tolist(), strict=False):
        expected[slot] = token
    assert tables.last_token[:9].cpu().numpy().tolist() == expected
    rows = index_tensor(np.array([4, -1 - 8, -1, 7, -1 - 1]), DEVICE)
    assert tables.token_ids(rows).cpu().numpy().tolist() == [4, expected[8], expected[0], 7, 77]


def test_slots_are_admitted_again(rng: np.random.Generator) -> None:
    tables = table_of([Params(seed=1, temperature=0.5)] * 4, 6)
    before = tables.params.clone()
    again = np.zeros(2, SLOT)
    again["temperature"], again["top_k"], again["seed"] = [3.0, 4.0], [7, 8], [2**64 - 1, 5]
    tables.admit(np.array([5, 1]), again)
    assert torch.equal(tables.params[[0, 2, 3, 4, 6]], before[[0, 2, 3, 4, 6]])
    assert tables.params[[5, 1]].cpu().numpy().tobytes() == again.tobytes()
    tables.admit(np.zeros(0, np.int64), again[:0])


@pytest.mark.gpu
def test_a_captured_graph_reads_new_logits_and_parameters(rng: np.random.Generator) -> None:
    rows, vocab = 24, 20_000
    tables = table_of([Params()] * rows, rows)
    logits = torch.zeros(rows, vocab, device=DEVICE)
    slots, index = index_tensor(np.arange(rows), DEVICE), index_tensor(np.arange(rows), DEVICE)
    draw_tokens(logits, tables, slots, index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = draw_tokens(logits, tables, slots, index)
    for spread in (0.1, 3.0):
        params = [random_params(rng, vocab) for _ in range(rows)]
        new = rng.normal(0, spread, (rows, vocab)).astype(np.float32)
        at = rng.integers(0, 100, rows)
        tables.params.copy_(table_of(params, rows).params)
        logits.copy_(device_tensor(new, DEVICE))
        index.copy_(index_tensor(at, DEVICE))
        graph.replay()
        expected = draw(new, params, at)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
