"""What the host needs to launch a strategy does not depend on the heads: one number for all tables.

Measured table by table it is off by 5 to 30 %, as a host is busier at one moment than at another
and some strategies are measured a few times only; strategies whose launches take as long would then
be told apart by that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from stemserve.kernels.pricing.calibration_blocks import four_digits
from stemserve.kernels.pricing.cost_correction import Corrections
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.strategy import Phase

ROUNDS = 3  # of strategies' medians over tables and tables' medians over strategies

Hosts = Mapping[tuple[Phase, str], float]  # seconds of the strategies of a table


def with_common_hosts(tables: Sequence[CostTable]) -> list[CostTable]:
    """Tables of one device with the same host seconds for the same strategy; a CPU's are kept."""
    shared = [table for table in tables if not table.is_serial]
    if len(shared) < 2:
        return list(tables)
    common = common_hosts([_hosts(table) for table in shared])
    return [table if table.is_serial else _with_hosts(table, common) for table in tables]


def common_hosts(tables: Sequence[Hosts]) -> dict[tuple[Phase, str], float]:
    """Medians over the tables, each freed of how busy the host was when it was measured."""
    keys = {key for hosts in tables for key in hosts}
    busy = [1.0] * len(tables)
    common: dict[tuple[Phase, str], float] = {}
    for _ in range(ROUNDS):
        common = {
            key: median(hosts[key] / busy[i] for i, hosts in enumerate(tables) if key in hosts)
            for key in keys
        }
        busy = [median(hosts[key] / common[key] for key in hosts) for hosts in tables]
    return common


def _hosts(table: CostTable) -> dict[tuple[Phase, str], float]:
    return {
        (phase, key): found.host_seconds
        for phase, corrections in table.corrections.items()
        for key, found in corrections.strategies.items()
    }


def _with_hosts(table: CostTable, common: Hosts) -> CostTable:
    corrections: dict[Phase, Corrections] = {}
    for phase, found in table.corrections.items():
        strategies = {
            key: replace(value, host_seconds=four_digits(common[phase, key]))
            for key, value in found.strategies.items()
        }
        corrections[phase] = Corrections(shapes=found.shapes, strategies=strategies)
    return replace(table, corrections=corrections)
