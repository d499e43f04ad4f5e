"""The server's settings, read once from a TOML file, the environment and the command line."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from stemserve.service.config.error import ConfigError
from stemserve.service.config.server import ServiceConfig

# Two underscores: Kubernetes gives every pod beside a Service called stemserve variables such as
# STEMSERVE_PORT, which are not ours.
ENVIRONMENT_PREFIX = "STEMSERVE__"
DEFAULT = "default"

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value that somebody gave for a key."""

    value: Any
    source: str  # as a message names it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings in force, and who gave each of them."""

    config: ServiceConfig
    sources: Mapping[str, str]  # key -> source, of the keys that were given


def read_settings(
    *, file: Path | None, environment: Mapping[str, str], flags: Mapping[str, Setting]
) -> Settings:
    """A flag beats the environment, which beats the file, which beats the default.

    Keys have the names of the fields: `server.port`. Raises ConfigError, which names the key and
    where its value came from.
    """
    given = {} if file is None else _from_file(file)
    given |= _from_environment(environment)
    given |= flags
    sources = {key: setting.source for key, setting in given.items()}
    tree: Tree = {}
    for key, setting in given.items():
        _put(tree, key, setting)
    try:
        config = TypeAdapter(ServiceConfig).validate_python(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_problems(error, sources))) from error
    return Settings(config=config, sources=sources)


def settings_text(settings: Settings) -> str:
    """The settings in force as a TOML file, each with its source behind it. It holds no secret:
    keys are configured as hashes, certificates as paths."""
    lines: list[str] = []
    section = ""
    for key, value in sorted(_values(settings.config), key=lambda pair: pair[0].count(".") > 0):
        table, _, name = key.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        lines.append(f"{_toml(name, value)}  # {settings.sources.get(key, DEFAULT)}")
    return "\n".join(lines) + "\n"


def _values(config: Any, path: str = "") -> list[tuple[str, Any]]:
    """Every key with its value, scalars of a table before its tables."""
    named = _named(config)
    keys = [(f"{path}.{name}" if path else str(name), value) for name, value in named]
    scalars = [(key, value) for key, value in keys if not _is_table(value)]
    tables = [pair for key, value in keys if _is_table(value) for pair in _values(value, key)]
    return scalars + tables


def _named(table: Any) -> list[tuple[str, Any]]:
    if isinstance(table, Mapping):
        return list(cast(Mapping[str, Any], table).items())
    return [(item.name, getattr(table, item.name)) for item in fields(table)]


def _is_table(value: Any) -> bool:
    return is_dataclass(value) or isinstance(value, Mapping)


def _toml(name: str, value: Any) -> str:
    if value is None:
        return f"# {name}"  # TOML has no null
    plain = str(value) if isinstance(value, Path) else value
    return f"{name} = {json.dumps(plain)}"


def _from_file(path: Path) -> dict[str, Setting]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from error
    return {key: Setting(value=value, source=str(path)) for key, value in _leaves(tree)}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    named = {name: name for name in environment if name.startswith(ENVIRONMENT_PREFIX)}
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", "."): Setting(
            value=_scalar(environment[name]), source=name
        )
        for name in named
    }


def _scalar(text: str) -> Any:
    """A variable's text as TOML would read it, so that lists work; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _leaves(tree: Tree, path: str = "") -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        key = f"{path}.{name}" if path else name
        below = _leaves(cast(Tree, value), key) if isinstance(value, dict) else []
        # An empty table may be all that a tenant has.
        leaves += below or [(key, value)]
    return leaves


def _put(tree: Tree, key: str, setting: Setting) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        below = tree.setdefault(parent, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{key} ({setting.source}): {parent} is a value, not a table")
        tree = cast(Tree, below)
    tree[name] = setting.value


def _problems(error: ValidationError, sources: Mapping[str, str]) -> list[str]:
    problems: list[str] = []
    for detail in error.errors(include_url=False):
        key = ".".join(str(part) for part in detail["loc"])
        cause = detail.get("ctx", {}).get("error")
        if detail["type"] == "unexpected_keyword_argument":
            text = f"there is no such key{_suggestion(key)}"
        elif detail["type"] == "dataclass_type":
            text = f"is a table: write [{key}] and its keys below"
        else:
            text = str(cause or detail["msg"])
        source = _source(key, sources)
        problems.append(f"{key or 'settings'}{source}: {text}")
    return problems


def _source(key: str, sources: Mapping[str, str]) -> str:
    """Who gave the key, or the keys below it."""
    below = {s for name, s in sources.items() if not key or f"{name}.".startswith(f"{key}.")}
    named = sources.get(key)
    givers = [named] if named else sorted(below)
    return f" ({', '.join(givers)})" if givers else ""


def _suggestion(key: str) -> str:
    parent, _, name = key.rpartition(".")
    above = f"{parent}." if parent else ""
    known = {k[len(above) :].split(".")[0] for k in known_keys() if k.startswith(above)}
    elsewhere = [k for k in known_keys() if k.endswith(f".{name}")]
    close = difflib.get_close_matches(name, known, n=1) or elsewhere[:1]
    return f"; did you mean {close[0]}?" if close else ""


def known_keys() -> list[str]:
    """Every key but those under the names of tenants."""
    return [key for key, _ in _values(ServiceConfig())]
