"""Host seconds of strategies that several tables share."""

from dataclasses import replace

import numpy as np
import pytest

from stemserve.kernels.pricing.common_hosts import common_hosts, with_common_hosts
from stemserve.kernels.pricing.cost_correction import Corrections, StrategyCorrection
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.cost_table_file import shipped_cost_tables
from stemserve.kernels.strategy import Phase

KEYS = [(Phase.PREFILL, f"strategy {i}") for i in range(5)]


@pytest.mark.parametrize("seed", range(5))
def test_a_wrong_moment_and_a_busy_host_are_taken_out(seed: int) -> None:
    """Each strategy's time is off once, by a lot; whole tables are 10 % slower or faster."""
    rng = np.random.default_rng(seed)
    true = dict(zip(KEYS, rng.uniform(30e-6, 90e-6, len(KEYS)), strict=True))
    tables = [{key: value * busy for key, value in true.items()} for busy in (0.9, 1.0, 1.1, 1.0)]
    for table, key in zip(tables, KEYS, strict=False):
        table[key] *= 1.5
    assert common_hosts(tables) == pytest.approx(true, rel=0.03)


def test_a_strategy_of_one_table_is_freed_of_its_busy_host() -> None:
    hosts = [{key: 50e-6 * busy for key in KEYS} for busy in (1.0, 1.2, 1.0)]
    hosts[1][Phase.PREFILL, "alone"] = 60e-6
    assert common_hosts(hosts)[Phase.PREFILL, "alone"] == pytest.approx(50e-6)


def corrected(costs: CostTable, device: str, host_s: float) -> CostTable:
    found = Corrections(
        shapes=((1.0,) * 5,),
        strategies={"naive:fa2": StrategyCorrection(host_seconds=host_s, device=(0.1,))},
    )
    return replace(costs, device=device, corrections={Phase.PREFILL: found})


def test_only_the_hosts_of_a_gpus_tables_change(costs: CostTable) -> None:
    gpu = [corrected(costs, "nvidia-h200", host_s) for host_s in (40e-6, 50e-6, 80e-6)]
    cpu = corrected(costs, "cpu", 7e-3)
    *found, last = with_common_hosts([*gpu, cpu])
    assert last is cpu
    assert len({table.corrections[Phase.PREFILL].strategies["naive:fa2"] for table in found}) == 1
    assert [replace(a, corrections=b.corrections) for a, b in zip(found, gpu, strict=True)] == gpu


def test_one_table_stays_as_it_was_measured(costs: CostTable) -> None:
    table = corrected(costs, "nvidia-h200", 40e-6)
    assert with_common_hosts([table]) == [table]


def test_the_shipped_tables_have_common_hosts() -> None:
    tables = list(shipped_cost_tables("nvidia-h200"))
    assert len(tables) > 1
    assert with_common_hosts(tables) == tables
