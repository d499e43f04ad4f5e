"""A Score call in token ids: what scoring plans reads for."""

from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import numpy as np

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import Caller
from stemserve.service.limits import Limits
from stemserve.service.packed_tokens import PackedTokens, join, repeat
from stemserve.service.request import Int32, Trunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why one item has no score."""

    code: grpc.StatusCode
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreCall:
    request: inference_pb2.ScoreRequest
    caller: Caller
    limits: Limits
    contexts: tuple[Int32, ...]
    trunks: tuple[Trunk, ...] = ()  # of the contexts; empty: they have none
    items: PackedTokens
    item_context: Int32  # [items]
    query: Int32  # read after each item; empty unless item_first
    labels: tuple[tuple[int, ...], ...]  # distinct; empty unless the mode is label_probabilities
    problems: Mapping[int, Problem]  # by item
    classes: int = 0  # of the classification head

    @property
    def scored_items(self) -> Int32:
        items = np.arange(len(self.items), dtype=np.int32)
        return np.delete(items, list(self.problems)) if self.problems else items


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredRows:
    """The items without a problem, each as the sequence that the model reads after its context."""

    items: Int32  # [rows] item of each row
    context: Int32  # [rows]
    item_lengths: Int32  # [rows]
    sequences: PackedTokens  # item, then the query where the item comes first


def scored_rows(call: ScoreCall) -> ScoredRows:
    rows = call.scored_items
    items = call.items.take(rows) if call.problems else call.items
    return ScoredRows(
        items=rows,
        context=call.item_context[rows] if call.problems else call.item_context,
        item_lengths=items.lengths,
        sequences=join(items, repeat(call.query, len(rows))) if len(call.query) else items,
    )
