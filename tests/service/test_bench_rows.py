"""The rows of the baselines, and which of them a server is measured by."""

import numpy as np
import pytest

from stemserve.proto.v1 import inference_pb2
from stemserve.service.bench.models import SHAPES
from stemserve.service.bench.rows import (
    BASELINES,
    UNSHARED,
    DecodeRow,
    ScoreRow,
    UnsharedRow,
    chosen,
    for_server,
)
from stemserve.service.bench.tokens import TokenSource

NAMES = {key: shape.name for key, shape in SHAPES.items()}
SMALL = ScoreRow(model="0.6B", prefix_tokens=7, item_tokens=3, items=4, calls=2)


def test_every_row_has_a_name_of_its_own_and_a_goal_above_its_floor() -> None:
    assert len({row.name for row in BASELINES}) == len(BASELINES)
    for row in BASELINES:
        assert row.goal_ms is not None and row.floor_ms is not None
        assert 0 < row.floor_ms < row.goal_ms
    assert sum(isinstance(row, ScoreRow) for row in BASELINES) == 10
    assert sum(isinstance(row, DecodeRow) for row in BASELINES) == 6


def test_patterns_choose_rows_by_name_and_none_chooses_all() -> None:
    assert chosen(BASELINES, ()) == BASELINES
    decodes = chosen(BASELINES, ("decode 4B*",))
    assert {row.name.split("/")[0] for row in decodes} == {
        "decode 4B 1024", "decode 4B 8192", "decode 4B 50000"
    }  # fmt: skip
    two = chosen(BASELINES, ("score 4B 8192*", "score 0.6B 300/30/10/1"))
    assert [row.model for row in two] == ["0.6B", "4B"]
    assert chosen(BASELINES, ("nothing*",)) == ()


def test_a_server_of_a_known_model_keeps_its_rows_with_their_goals() -> None:
    rows = for_server("Qwen3-4B", BASELINES, NAMES)
    assert rows == tuple(row for row in BASELINES if row.model == "4B")


def test_a_server_of_another_model_has_the_sizes_without_goals() -> None:
    rows = for_server("mine", BASELINES, NAMES)
    assert len(rows) == sum(row.model == "0.6B" for row in BASELINES)
    assert all(
        not isinstance(row, UnsharedRow) and row.goal_ms is None and row.floor_ms is None
        for row in rows
    )
    assert rows[0].name == "score mine 300/30/10/1"
    assert [row.name for row in for_server("mine", UNSHARED, NAMES)] == [
        "unshared mine 1024+128/32"
    ]


@pytest.mark.parametrize("key", SHAPES)
def test_a_shape_has_as_many_weights_as_its_name_says(key: str) -> None:
    shape = SHAPES[key]
    queries, keys = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * queries + 2 * keys + 3 * shape.intermediate)
    billions = (shape.layers * layer + shape.vocab * shape.hidden) / 1e9
    assert billions == pytest.approx(float(key.removesuffix("B")), rel=0.05)


def test_a_round_keeps_its_ids_and_no_two_rounds_share_a_prefix() -> None:
    source = TokenSource(vocab=1_000, seed=5)
    first, again, other = (source.score_round(SMALL, number) for number in (0, 0, 1))
    np.testing.assert_array_equal(first.prefixes, again.prefixes)
    np.testing.assert_array_equal(first.items, again.items)
    assert first.label_ids == again.label_ids
    assert (first.prefixes != other.prefixes).any()
    assert (first.prefixes[0] != first.prefixes[1]).any()
    assert first.items.max() < 1_000


def test_requests_carry_the_ids_of_their_round() -> None:
    work = TokenSource(vocab=1_000, seed=6).score_round(SMALL, 3)
    for call, blob in enumerate(work.requests()):
        request = inference_pb2.ScoreRequest.FromString(blob)
        prefix = np.frombuffer(request.contexts[0].tokens, "<u4")
        np.testing.assert_array_equal(prefix, work.prefixes[call])
        items = np.frombuffer(request.item_tokens.tokens, "<u4").reshape(4, 3)
        np.testing.assert_array_equal(items, work.items[call])
        assert list(request.item_tokens.offsets) == [0, 3, 6, 9, 12]
        assert tuple(request.label_probabilities.label_token_ids) == work.label_ids


def test_requests_name_registered_prefixes_instead_of_their_ids() -> None:
    work = TokenSource(vocab=1_000, seed=7).score_round(SMALL, 0)
    requests = map(inference_pb2.ScoreRequest.FromString, work.requests(("one", "two")))
    contexts = [request.contexts[0] for request in requests]
    assert [context.prefix_id for context in contexts] == ["one", "two"]
    assert not any(context.tokens for context in contexts)


def test_rounds_of_a_generate_row_share_the_prefix_and_nothing_else() -> None:
    row = DecodeRow(model="0.6B", prefix_tokens=20, requests=3)
    source = TokenSource(vocab=1_000, seed=8)
    first, second = source.decode_round(row, 0), source.decode_round(row, 1)
    np.testing.assert_array_equal(first.prefix, second.prefix)
    assert (first.own != second.own).any()
    request = inference_pb2.GenerateRequest.FromString(first.requests(64)[2])
    prompt = np.frombuffer(request.prompt.tokens, "<u4")
    np.testing.assert_array_equal(prompt, np.concatenate((first.prefix, first.own[2])))
    assert request.ignore_eos and request.max_new_tokens == 64
