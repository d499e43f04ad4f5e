import pytest
from flex_peer import row_ranges
from kernel_trees import node_slots
from tests.benchmarks.bench_cases import random_tree


@pytest.mark.parametrize("seed", range(4))
def test_a_slot_is_seen_by_the_rows_below_its_node(seed: int) -> None:
    case = random_tree(seed)
    low, high = row_ranges(case)
    seen = {
        row: {slot for node in case.layout.chain(leaf) for slot in node_slots(case.layout, node)}
        for row, leaf in enumerate(case.leaves)
    }
    for slot in range(len(low)):
        rows = set(range(low[slot], high[slot]))
        assert rows == {row for row, slots in seen.items() if slot in slots}
