"""What FlashInfer's strategies refuse, and the work that they choose: host code, on any machine."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.forests import Node, Segment, head_shape, items_over, make_layout

from stemserve.kernels.flashinfer_paths.backends import Backend
from stemserve.kernels.flashinfer_paths.cascade import FlashInferCascadeDecode
from stemserve.kernels.flashinfer_paths.costs import StrategyCosts, TileCosts
from stemserve.kernels.flashinfer_paths.prefill import Prefill, device_tables, mask_mode
from stemserve.kernels.flashinfer_paths.runtime import FlashInferRuntime
from stemserve.kernels.flashinfer_paths.strategies import (
    FlashInferCustomMask,
    FlashInferMultiItem,
    FlashInferNaive,
    FlashInferPaged,
    FlashInferRagged,
)
from stemserve.kernels.flashinfer_paths.tables import ragged_tables
from stemserve.kernels.flashinfer_paths.tree_tables import (
    custom_mask_tables,
    multi_item_tables,
)
from stemserve.kernels.flashinfer_paths.workspace import Workspace
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.page_gather import TokenScratch
from stemserve.kernels.pricing.engine_cost import Cost
from stemserve.kernels.strategy import Kernel, Phase, Work

CPU = torch.device("cpu")
SHAPE = head_shape(16, 8, 128)


def runtime(costs: StrategyCosts | None = None, max_tokens: int = 1 << 18) -> FlashInferRuntime:
    """Enough to weigh work, with no kernel loaded."""
    return FlashInferRuntime(
        shape=SHAPE,
        device=CPU,
        prefill=Prefill(SHAPE, {}, Workspace(CPU, 1024)),
        scratch=TokenScratch(SHAPE, CPU, torch.float16, max_tokens=max_tokens),
        costs=costs or TileCosts(SHAPE, 132),
        backends=tuple(Backend),
    )


def cold(prefix: int, rows: int, items: int) -> AttentionLayout:
    segments = [Segment(rows=prefix), *[Segment(rows=rows, is_item=True)] * items]
    return make_layout([Node(tokens=prefix)], segments)


def engines(work: Work) -> list[str]:
    return [part.engine for part in work.parts]


def test_long_rows_go_to_fa3_and_short_ones_to_fa2() -> None:
    ragged = FlashInferRagged(runtime())
    assert engines(ragged.work(cold(8196, 4, 32))) == ["gather", "fa3"]
    assert engines(ragged.work(items_over(8196, [4] * 32))) == ["gather", "fa2_16"]
    stored = make_layout([Node(tokens=8196)], [Segment(rows=8196)])
    assert engines(ragged.work(stored)) == ["fa3"]
    assert engines(FlashInferNaive(runtime()).work(stored)) == ["gather", "fa3_rows"]
    decode = make_layout([Node(tokens=1000)], [Segment()] * 64)
    assert engines(FlashInferPaged(runtime()).work(decode)) == ["fa2_16"]


def test_pages_that_are_widened_are_copied_whoever_reads_them() -> None:
    known = runtime(max_tokens=1000)
    ragged = FlashInferRagged(replace(known, widens=True))
    stored = make_layout([Node(tokens=512)], [Segment(rows=512)])
    assert engines(ragged.work(stored))[0] == "gather"
    longer = make_layout([Node(tokens=1024)], [Segment(rows=512)])
    assert "limit is 1000" in str(ragged.refusal(longer))
    assert FlashInferRagged(known).refusal(longer) is None


def test_other_costs_choose_otherwise() -> None:
    class Fa2Only:
        def strategy_cost(
            self, phase: Phase, kernel: Kernel, layout: AttentionLayout, work: Work
        ) -> Cost:
            return Cost(0.0, float(any(engine.startswith("fa3") for engine in engines(work))))

    ragged = FlashInferRagged(runtime(Fa2Only()))
    assert engines(ragged.work(cold(8196, 4, 32))) == ["gather", "fa2"]


def test_work_counts_what_is_copied_and_what_every_request_reads() -> None:
    copy, attention = FlashInferRagged(runtime()).work(items_over(20, [3, 1])).parts
    assert copy.kv_tokens.tolist() == [32 + 16 + 16]
    assert attention.rows.tolist() == [3, 1]
    assert attention.kv_tokens.tolist() == [23, 21]
    assert attention.causal
    items = FlashInferMultiItem(runtime()).work(items_over(20, [3, 1])).parts[1]
    assert items.rows.tolist() == [4] and items.kv_tokens.tolist() == [24]
    assert items.kv_tokens_read == 24 and not items.causal


def test_nothing_to_see_is_no_work() -> None:
    blind = make_layout([Node(tokens=0)], [Segment(rows=2)])
    for made in (FlashInferNaive, FlashInferRagged, FlashInferMultiItem, FlashInferCustomMask):
        assert made(runtime()).work(blind).parts == ()


def test_cascade_works_level_by_level() -> None:
    nodes = [Node(tokens=160), *[Node(parent=0, tokens=5) for _ in range(3)]]
    layout = make_layout(nodes, [Segment(node=n) for n in (1, 2, 3)])
    *levels, merge = FlashInferCascadeDecode(runtime()).work(layout).parts
    assert [level.rows.tolist() for level in levels] == [[3], [1, 1, 1]]
    assert [level.kv_tokens.tolist() for level in levels] == [[160], [5, 5, 5]]
    assert merge.engine == "merge" and merge.rows.tolist() == [6]


def test_copies_beyond_the_scratch_are_refused() -> None:
    small = runtime(max_tokens=1000)
    layout = items_over(512, [4, 4])
    assert "limit is 1000" in str(FlashInferNaive(small).refusal(layout))
    assert FlashInferRagged(small).refusal(layout) is None
    assert FlashInferMultiItem(small).refusal(layout) is None
    long = items_over(990, [4, 4])
    assert "limit is 1000" in str(FlashInferRagged(small).refusal(long))
    assert "limit is 1000" in str(FlashInferMultiItem(small).refusal(long))
    assert "limit is 1000" in str(FlashInferCustomMask(small).refusal(long))
    stored = make_layout([Node(tokens=4000)], [Segment(rows=4000)])
    assert FlashInferRagged(small).refusal(stored) is None  # reads the pool's pages


def test_large_masks_and_long_items_are_refused() -> None:
    masked = FlashInferCustomMask(runtime()).refusal(cold(8196, 256, 32))
    assert "bits" in str(masked)
    assert "65535" in str(FlashInferMultiItem(runtime()).refusal(items_over(16, [65536])))


def test_multi_item_refuses_trees_with_several_prefixes() -> None:
    nodes = [Node(tokens=16), Node(parent=0, tokens=4)]
    branching = make_layout(nodes, [Segment(node=0, is_item=True), Segment(node=1, is_item=True)])
    assert "branches" in str(FlashInferMultiItem(runtime()).refusal(branching))


def test_decode_strategies_refuse_what_belongs_to_prefill() -> None:
    for made in (FlashInferPaged, FlashInferCascadeDecode):
        assert "item" in str(made(runtime()).refusal(items_over(8, [1])))


def ints(tensor: torch.Tensor) -> list[int]:
    return [int(value) for value in tensor]


def test_the_arrays_of_a_batch_travel_in_one_buffer() -> None:
    layout = items_over(37, [5, 1, 40])
    for tables, mode in (
        (ragged_tables(layout), 1),
        (multi_item_tables(layout), 3),
        (custom_mask_tables(layout), 2),
    ):
        batch = tables.batch
        arrays = device_tables(batch, CPU)
        assert mask_mode(batch) == mode
        assert len({tensor.untyped_storage().data_ptr() for tensor in arrays.values()}) == 1
        assert all(tensor.data_ptr() % 16 == 0 for tensor in arrays.values())
        assert ints(arrays["row_indptr"]) == batch.row_indptr.tolist()
        assert ints(arrays["kv_indptr"]) == batch.kv_indptr.tolist()
        assert batch.pages is not None and ints(arrays["pages"]) == batch.pages.tolist()
        if batch.items is not None:
            places = arrays["places"].numpy().view("uint16")[: batch.items.places.size]
            assert places.tolist() == batch.items.places.ravel().tolist()
