import torch
from choices import Choices, worth_timing
from prefill_shapes import PrefillShape

from stemserve.kernels.pricing.engine_cost import Cost
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.worker.choice.dispatch import Prediction


def prediction(kernel: Kernel, us: float, refusal: str | None = None) -> Prediction:
    return Prediction(
        kernel=kernel, cost=Cost(us * 1e-6, us * 1e-6), kv_tokens_read=0, refusal=refusal
    )


def test_strategies_predicted_beyond_ten_times_the_best_are_not_timed() -> None:
    found = [
        prediction(Kernel.CODEC, 10),
        prediction(Kernel.RAGGED, 100),
        prediction(Kernel.NAIVE, 101),
        prediction(Kernel.SPLIT, 0, "too long"),
    ]
    assert [one.kernel for one in worth_timing(found)] == [Kernel.CODEC, Kernel.RAGGED]


def test_predictions_are_those_of_a_worker_for_any_heads() -> None:
    choices = Choices(device=torch.device("cpu"), dtype=torch.float32)
    for query_heads, kv_heads in ((16, 8), (28, 4)):
        shape = PrefillShape(
            prefix=40, item=3, items=4, query_heads=query_heads, kv_heads=kv_heads, cached=True
        )
        found = choices.predictions(Phase.PREFILL, shape.layout(), shape.heads)
        able = [one for one in found if one.refusal is None]
        assert able == found[: len(able)]
        assert [one.seconds for one in able] == sorted(one.seconds for one in able)
        assert choices.costs(shape.heads).query_heads == query_heads
    assert choices.lacking is None
