"""Log-probabilities of asked tokens, against a log-softmax in numpy."""

import numpy as np
import pytest
from tests.worker.draws import draw, mask_of, message, samples_of
from tests.worker.plans import blob
from tests.worker.tiny_model import CPU

from stemserve.kernels.host_array import device_tensor
from stemserve.worker.blobs import BadPlan
from stemserve.worker.sampling.params import decode_sampler
from stemserve.worker.sampling.sampler import Sampler

VOCAB = 50


@pytest.mark.parametrize("seed", range(10))
def test_each_sample_gets_its_likeliest_tokens_and_then_those_it_asks_for(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = 12
    logits = rng.normal(0, 3, (rows, VOCAB)).astype(np.float32)
    likeliest = rng.choice([0, 0, 1, 5], rows)
    asked: list[list[int]] = [
        rng.integers(0, VOCAB, int(rng.choice([0, 0, 1, 7]))).tolist() for _ in range(rows)
    ]
    samplers = [
        message(
            temperature=float(rng.choice([0.0, 0.7])),
            seed=row,
            top_logprobs=int(likeliest[row]),
            logprob_ids=blob(asked[row]),
            banned_ids=blob([3, 4]),
            presence_penalty=float(rng.choice([0.0, 1.0])),
        )
        for row in range(rows)
    ]
    drawn = draw(device_tensor(logits, CPU), samplers)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    for row in range(rows):
        by_logit: list[int] = np.argsort(-logits[row], kind="stable").tolist()
        wanted = by_logit[: likeliest[row]] + asked[row]
        assert drawn.top_counts[row] == len(wanted)
        assert drawn.top_ids[row, : len(wanted)].numpy().tolist() == wanted
        found = drawn.top_logprobs[row, : len(wanted)].numpy()
        np.testing.assert_allclose(found, exact[row, wanted], atol=1e-5)
        assert drawn.logprobs[row].item() == pytest.approx(
            exact[row, int(drawn.tokens[row])], abs=1e-5
        )


def test_an_asked_token_leaves_the_draws_as_they_are() -> None:
    logits = device_tensor(np.random.default_rng(1).normal(0, 1, (6, VOCAB)).astype("f4"), CPU)
    plain = [message(temperature=0.9, seed=row) for row in range(6)]
    asking = [message(temperature=0.9, seed=row, logprob_ids=blob([7])) for row in range(6)]
    found, wanted = draw(logits, asking), draw(logits, plain)
    assert found.tokens.numpy().tolist() == wanted.tokens.numpy().tolist()
    assert found.logprobs.numpy().tolist() == pytest.approx(wanted.logprobs.numpy().tolist())


@pytest.mark.parametrize("seed", range(10))
def test_samples_that_only_read_get_the_likeliest_of_their_mask(seed: int) -> None:
    """However it is written; without one, of all."""
    rng = np.random.default_rng(seed)
    rows = 12
    logits = rng.choice([-1.0, 0.0, 2.5], (rows, VOCAB)).astype(np.float32)  # many are equal
    most = rng.choice([1, 3, VOCAB], rows)
    of_mask = rng.random(rows) < 0.7
    legal = [np.sort(rng.permutation(VOCAB)[: rng.integers(1, 9)]) for _ in range(rows)]
    sampler = Sampler(rows, CPU)
    samplers = [
        message(slot=row, top_logprobs=int(most[row]), reads_only=True) for row in range(rows)
    ]
    sampler.admit([decode_sampler(each, slots=rows, vocab_size=VOCAB) for each in samplers])
    sampler.mask(
        [
            mask_of(row, legal[row], VOCAB, as_ids=bool(rng.integers(2)))
            for row in range(rows)
            if of_mask[row]
        ]
    )
    samples = samples_of(range(rows), [0] * rows)
    assert sampler.only_reads(samples).all() and not sampler.takes_likeliest(samples).any()
    drawn = sampler.read(device_tensor(logits, CPU), samples)
    assert drawn.tokens.numpy().tolist() == [-1] * rows
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    for row in range(rows):
        known = legal[row] if of_mask[row] else np.arange(VOCAB)
        wanted = known[np.argsort(-logits[row, known], kind="stable")][: most[row]].tolist()
        assert drawn.top_counts[row] == len(wanted)
        assert drawn.top_ids[row, : len(wanted)].numpy().tolist() == wanted
        found = drawn.top_logprobs[row, : len(wanted)].numpy()
        np.testing.assert_allclose(found, exact[row, wanted], atol=1e-5)
        assert not drawn.failed[row]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_sample_that_only_reads_fails_where_nothing_is_finite(bad: float) -> None:
    logits = np.random.default_rng(2).normal(0, 1, (3, VOCAB)).astype(np.float32)
    logits[1, 3 if bad != -np.inf else slice(None)] = bad
    logits[2, :-1] = -np.inf
    sampler = Sampler(3, CPU)
    for row in range(3):
        params = message(slot=row, top_logprobs=1, reads_only=True)
        sampler.admit([decode_sampler(params, slots=3, vocab_size=VOCAB)])
    drawn = sampler.read(device_tensor(logits, CPU), samples_of(range(3), [0] * 3))
    assert drawn.failed.numpy().tolist() == [False, True, False]
    assert drawn.top_ids[2, 0] == VOCAB - 1 and drawn.top_logprobs[2, 0] == 0


def test_a_sampler_that_only_reads_reads_something_and_no_asked_tokens() -> None:
    params = message(top_logprobs=2, reads_only=True, logprob_ids=blob([1]))
    with pytest.raises(BadPlan, match="exclude each other"):
        decode_sampler(params, slots=1, vocab_size=VOCAB)
    with pytest.raises(BadPlan, match="reads nothing"):
        decode_sampler(message(reads_only=True), slots=1, vocab_size=VOCAB)
