"""A calibration on a small grid."""

import torch
from tests.kernels.forests import head_shape

from stemserve.kernels.calibration import Grid, measure_cost_table
from stemserve.kernels.cost_model import CostTable


def test_a_calibration_is_a_valid_table_of_its_device() -> None:
    reports: list[tuple[int, int]] = []
    grid = Grid(rows=(1, 8), kv_tokens=(4, 64))
    table = measure_cost_table(
        head_shape(4, 2, 16),
        torch.device("cpu"),
        torch.float32,
        lambda done, total: reports.append((done, total)),
        grid,
    )
    assert (table.device, table.dtype, table.rows) == ("cpu", "float32", (1, 8))
    assert table.libraries["torch"] == torch.__version__
    assert CostTable.from_json(table.to_json()) == table
    assert reports == [(done, 12) for done in range(13)]
