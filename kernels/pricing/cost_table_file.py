"""Cost tables as JSON: several to a file, one for each shape of heads that was measured."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from stemserve.kernels.layout import HeadShape
from stemserve.kernels.pricing.cost_correction import Corrections, StrategyCorrection
from stemserve.kernels.pricing.cost_model import CostTable
from stemserve.kernels.pricing.engine_cost import BlockEngine, CostTableError, Engine, TileEngine
from stemserve.kernels.strategy import Phase

FORMAT_VERSION = 2
SHIPPED_TABLES = Path(__file__).parent.parent / "costs"
REMEDY = "run stemserve calibrate to have one measured"
HALF_TYPES = ("float16", "bfloat16")  # cost the same

_ENGINES: Mapping[str, type[Engine]] = {"blocks": BlockEngine, "tiles": TileEngine}
_NUMBERS = re.compile(r'\[[^\[\]{}"]*\]')
_Value = TypeVar("_Value")


def tables_json(tables: Sequence[CostTable]) -> str:
    entries = [_table_entries(table) for table in tables]
    return _compact({"format_version": FORMAT_VERSION, "tables": entries})


def parse_tables(text: str) -> tuple[CostTable, ...]:
    """Raises CostTableError."""
    try:
        loaded: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise CostTableError(f"cost table is not JSON: {error}; {REMEDY}") from error
    if not isinstance(loaded, dict):
        raise CostTableError(f"a file of cost tables must be a JSON object; {REMEDY}")
    found = cast(dict[str, Any], loaded)
    if found.get("format_version") != FORMAT_VERSION:
        raise CostTableError(
            f"cost table has format {found.get('format_version')}, this version reads"
            f" {FORMAT_VERSION}; {REMEDY}"
        )
    try:
        tables = tuple(_table(entries) for entries in found["tables"])
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, CostTableError):
            raise
        raise CostTableError(f"cost table has a value of the wrong kind: {error!r}") from error
    if not tables:
        raise CostTableError(f"a file of cost tables has none; {REMEDY}")
    return tables


def load_cost_tables(path: Path) -> tuple[CostTable, ...]:
    return parse_tables(path.read_text())


def shipped_cost_tables(device: str) -> tuple[CostTable, ...]:
    """The tables that come with this package for a device; empty if they have to be measured."""
    path = SHIPPED_TABLES / f"{device}.json"
    return load_cost_tables(path) if path.is_file() else ()


def of_dtype(tables: Sequence[CostTable], dtype: str) -> list[CostTable]:
    alike = HALF_TYPES if dtype in HALF_TYPES else (dtype,)
    return [table for table in tables if table.dtype in alike]


def table_for_heads(tables: Sequence[CostTable], shape: HeadShape) -> CostTable:
    """The table of the heads, or the nearest one scaled to them."""

    def distance(table: CostTable) -> tuple[float, ...]:
        group = table.query_heads // table.kv_heads
        width, own_width = table.query_heads * table.head_dim, shape.query_heads * shape.head_dim
        return (
            _ratio(table.head_dim, shape.head_dim),
            _ratio(group, shape.group),
            _ratio(width, own_width),
        )

    nearest = min(tables, key=distance)
    heads = (shape.query_heads, shape.kv_heads, shape.head_dim)
    if (nearest.query_heads, nearest.kv_heads, nearest.head_dim) == heads:
        return nearest
    return nearest.scaled(shape)


def _ratio(one: int, other: int) -> float:
    return max(one / other, other / one)


def _table_entries(table: CostTable) -> dict[str, Any]:
    entries = {
        field.name: getattr(table, field.name)
        for field in fields(CostTable)
        if field.name not in ("engines", "corrections")
    }
    kinds = {kind: name for name, kind in _ENGINES.items()}
    entries["libraries"] = dict(table.libraries)
    entries["engines"] = {
        name: {"kind": kinds[type(engine)], **asdict(engine)}
        for name, engine in table.engines.items()
    }
    entries["corrections"] = {
        str(phase): {
            "shapes": found.shapes,
            "strategies": {key: asdict(value) for key, value in found.strategies.items()},
        }
        for phase, found in table.corrections.items()
    }
    return entries


def _table(entries: dict[str, Any]) -> CostTable:
    engines = {name: _engine(dict(values)) for name, values in entries["engines"].items()}
    corrections = {
        Phase(phase): _corrections(values) for phase, values in entries["corrections"].items()
    }
    return _of_entries(CostTable, entries | {"engines": engines, "corrections": corrections})


def _engine(entries: dict[str, Any]) -> Engine:
    kind = _ENGINES.get(entries.pop("kind", ""))
    if kind is None:
        raise CostTableError(f"the kind of an engine must be one of {sorted(_ENGINES)}")
    return _of_entries(kind, {name: _tuples(value) for name, value in entries.items()})


def _corrections(entries: dict[str, Any]) -> Corrections:
    return Corrections(
        shapes=_tuples(entries["shapes"]),
        strategies={
            key: _of_entries(
                StrategyCorrection, {name: _tuples(value) for name, value in values.items()}
            )
            for key, values in entries["strategies"].items()
        },
    )


def _of_entries(kind: type[_Value], entries: dict[str, Any]) -> _Value:
    names = {field.name for field in fields(cast(Any, kind))}
    if entries.keys() != names:
        raise CostTableError(
            f"{kind.__name__} of a cost table must have exactly the entries {sorted(names)},"
            f" not {sorted(entries)}"
        )
    return kind(**entries)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value  # pyright: ignore


def _compact(value: Any) -> str:
    """Indented, but a list of numbers on one line."""
    text = json.dumps(value, indent=1)
    return _NUMBERS.sub(lambda match: " ".join(match.group().split()), text) + "\n"
