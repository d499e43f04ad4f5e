"""Which strategies there are."""

import pytest
import torch
from tests.kernels.forests import head_shape

from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.registry import deterministic_set, strategies, strategy_set
from stemserve.kernels.strategy import Kernel, Phase


def test_every_strategy_is_registered_under_its_own_phase_and_kernel(costs: CostTable) -> None:
    found = strategies(
        head_shape(4, 2, 16), device=torch.device("cpu"), dtype=torch.float32, costs=costs
    )
    assert found.keys() == {
        (Phase.PREFILL, Kernel.NAIVE),
        (Phase.PREFILL, Kernel.SPLIT),
        (Phase.PREFILL, Kernel.RAGGED),
        (Phase.PREFILL, Kernel.CASCADE),
        (Phase.PREFILL, Kernel.MULTI_ITEM),
        (Phase.PREFILL, Kernel.CUSTOM_MASK),
        (Phase.DECODE, Kernel.PAGED),
        (Phase.DECODE, Kernel.CASCADE),
        (Phase.DECODE, Kernel.CODEC),
    }
    assert all((s.phase, s.kernel) == key for key, s in found.items())


def test_a_deterministic_set_has_one_strategy_a_phase_and_withholds_the_others(
    costs: CostTable,
) -> None:
    shape, cpu = head_shape(4, 2, 16), torch.device("cpu")
    known = deterministic_set(shape, device=cpu, dtype=torch.float32)
    assert sorted(phase for phase, _ in known.strategies) == sorted(Phase)
    every = strategies(shape, device=cpu, dtype=torch.float32, costs=costs).keys()
    assert known.withheld >= every - known.strategies.keys()
    assert not known.withheld & known.strategies.keys()
    assert known.lacking is None


def test_a_cpu_lacks_nothing(costs: CostTable) -> None:
    known = strategy_set(
        head_shape(4, 2, 64), device=torch.device("cpu"), dtype=torch.bfloat16, costs=costs
    )
    assert known.lacking is None


@pytest.mark.gpu
def test_a_gpu_has_flashinfers_strategies_in_place_of_torchs_in_16_bits(costs: CostTable) -> None:
    pytest.importorskip("flashinfer")
    known = strategy_set(
        head_shape(16, 8, 128), device=torch.device("cuda"), dtype=torch.float16, costs=costs
    )
    assert known.lacking is None
    names = {type(strategy).__name__ for strategy in known.strategies.values()}
    assert {"FlashInferRagged", "FlashInferPaged", "FlashInferCascadeDecode"} <= names


@pytest.mark.gpu
def test_heads_that_flashinfer_does_not_know_stay_on_torch_and_say_so(costs: CostTable) -> None:
    shape, device = head_shape(8, 8, 80), torch.device("cuda")
    known = strategy_set(shape, device=device, dtype=torch.float16, costs=costs)
    assert known.lacking is not None
    assert strategy_set(shape, device=device, dtype=torch.float32, costs=costs).lacking is None
