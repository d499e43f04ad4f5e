"""Log-probabilities of asked tokens, against a log-softmax in numpy."""

import numpy as np
import pytest
from tests.worker.plans import blob
from tests.worker.test_sampler import draw, message
from tests.worker.tiny_model import CPU

from stemserve.kernels.host_array import device_tensor

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
