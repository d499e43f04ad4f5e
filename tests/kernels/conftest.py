"""One thread for torch, and a cost table to plan with."""

from collections.abc import Iterator

import pytest
import torch

from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.cost_table_file import shipped_cost_tables


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def costs() -> CostTable:
    return shipped_cost_tables("cpu")[0]
