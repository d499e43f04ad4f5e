"""The rows of the two tables of baselines: what is called, its floor and its goal on one H200.

Beside them rows of requests that share nothing, where ours has only not to lose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Protocol, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    """Calls at the same moment, each of items that continue a prefix of its own; two labels."""

    model: str  # key of SHAPES
    prefix_tokens: int
    item_tokens: int
    items: int  # of a call
    calls: int
    floor_ms: float | None = None  # model and attention arithmetic, prefixes once, at 790 TFLOP/s
    goal_ms: float | None = None  # until the last call is answered

    @property
    def name(self) -> str:
        size = f"{self.prefix_tokens}/{self.item_tokens}/{self.items}/{self.calls}"
        return f"score {self.model} {size}"

    @property
    def call_item_tokens(self) -> int:
        return self.items * self.item_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """Requests at the same moment that share a prefix and have 16 tokens of their own."""

    model: str
    prefix_tokens: int
    requests: int
    own_tokens: int = 16
    new_tokens: int = 64
    floor_ms: float | None = None  # a token: weights and unique KV at 4.3 TB/s
    goal_ms: float | None = None  # a token

    @property
    def name(self) -> str:
        return f"decode {self.model} {self.prefix_tokens}/{self.requests}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsharedRow:
    """Requests at the same moment with prompts that have nothing in common."""

    model: str
    prompt_tokens: int = 1024
    requests: int = 32
    new_tokens: int = 128

    @property
    def name(self) -> str:
        return f"unshared {self.model} {self.prompt_tokens}+{self.new_tokens}/{self.requests}"

    @property
    def all_new_tokens(self) -> int:
        return self.requests * self.new_tokens


TableRow = ScoreRow | DecodeRow
Row = TableRow | UnsharedRow

LEAST_THROUGHPUT = 0.9  # of a peer's, where nothing is shared

_SCORES = (
    # model, prefix, item tokens, items, calls, floor, goal
    ("0.6B", 300, 30, 10, 1, 0.7, 4),
    ("0.6B", 300, 30, 10, 16, 11, 25),
    ("0.6B", 512, 128, 100, 1, 17, 27),
    ("0.6B", 2048, 64, 100, 1, 14, 23),
    ("0.6B", 2048, 64, 100, 8, 112, 172),
    ("0.6B", 8192, 4, 32, 1, 20, 32),
    ("0.6B", 8192, 32, 500, 1, 75, 115),
    ("0.6B", 8192, 256, 32, 1, 48, 74),
    ("4B", 2048, 64, 100, 1, 88, 112),
    ("4B", 8192, 32, 100, 1, 149, 195),
)
_DECODES = (
    # model, prefix, requests, floor, goal
    ("0.6B", 1024, 64, 0.4, 1.2),
    ("0.6B", 8192, 32, 0.5, 1.3),
    ("4B", 1024, 64, 2.0, 3.2),
    ("4B", 8192, 32, 2.2, 3.6),
    ("4B", 8192, 128, 2.4, 5.0),
    ("4B", 50000, 16, 3.6, 4.8),
)
BASELINES: tuple[TableRow, ...] = (
    *(
        ScoreRow(
            model=model,
            prefix_tokens=prefix,
            item_tokens=tokens,
            items=items,
            calls=calls,
            floor_ms=floor,
            goal_ms=goal,
        )
        for model, prefix, tokens, items, calls, floor, goal in _SCORES
    ),
    *(
        DecodeRow(
            model=model, prefix_tokens=prefix, requests=requests, floor_ms=floor, goal_ms=goal
        )
        for model, prefix, requests, floor, goal in _DECODES
    ),
)


UNSHARED = tuple(UnsharedRow(model=model) for model in ("0.6B", "4B"))


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=Named)


def chosen(rows: Sequence[AnyRow], globs: Sequence[str]) -> tuple[AnyRow, ...]:
    """Those whose name fits one of the patterns, in their order; all if there is none."""
    return tuple(row for row in rows if not globs or any(fnmatch(row.name, g) for g in globs))


def for_server(model: str, rows: Sequence[Row], names: Mapping[str, str]) -> tuple[Row, ...]:
    """The rows that a server of this model can be measured by; `names` are the models' by key.

    Of a model without baselines, those of the first model, without floors and goals.
    """
    for key, name in names.items():
        if name == model:
            return tuple(row for row in rows if row.model == key)
    first = next(iter(names))
    mine = [row for row in rows if row.model == first]
    return tuple(
        replace(row, model=model)
        if isinstance(row, UnsharedRow)
        else replace(row, model=model, floor_ms=None, goal_ms=None)
        for row in mine
    )
