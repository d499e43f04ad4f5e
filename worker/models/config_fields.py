"""Typed reading of the fields of a model's description."""

from collections.abc import Mapping
from typing import cast

from stemserve.worker.models.errors import ConfigError


class ConfigFields:
    """Fields of one JSON object or metadata table; null counts as absent.

    Every error names the file, the field and the value found.
    """

    def __init__(self, values: Mapping[str, object], *, source: str) -> None:
        self._values = values
        self.source = source

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def mentions(self, name: str) -> bool:
        """Also if the value is null."""
        return name in self._values

    def refuse(self, name: str, expected: str) -> ConfigError:
        found = repr(self._values[name]) if name in self._values else "absent"
        return ConfigError(f"{self.source}: {name} is {found}; expected {expected}")

    def count(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.refuse(name, f"a whole number, at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        return value

    def sequence(self, name: str) -> list[object]:
        """Empty if absent."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refuse(name, "a list")
        return cast("list[object]", value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, several, or none."""
        value = self._values.get(name)
        ids: list[object] = [] if value is None else [value]
        if isinstance(value, list):
            ids = cast("list[object]", value)
        tokens = tuple(i for i in ids if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
        if len(tokens) != len(ids):
            raise self.refuse(name, "a token id, or a list of them")
        return tokens

    def table(self, name: str) -> "ConfigFields | None":
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return ConfigFields(cast("dict[str, object]", value), source=f"{self.source}, {name}")

    def items(self) -> list[tuple[str, object]]:
        return list(self._values.items())
