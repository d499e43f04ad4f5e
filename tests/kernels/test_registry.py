"""Which strategies there are."""

import torch
from tests.kernels.forests import head_shape

from stemserve.kernels.cost_model import CostTable
from stemserve.kernels.registry import strategies
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
