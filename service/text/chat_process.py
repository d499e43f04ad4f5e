"""The process that runs a model's chat template: it may hang or ask for all memory, and be killed.

Reads lines of JSON on standard input and answers each with one. The first line has the templates
and the limits, each other one a template's name and its variables.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY_BYTES = 1 << 30
ERROR_CHARACTERS = 300
# All but stand-ins, which the caller knows by their code points (chat_marks.py).
ESCAPED = re.compile("[^\x00-\x7f\ud800-\udbff]")


class TooLong(Exception):
    pass


class GenerationBlocks(Extension):
    """`{% generation %}` marks what the model said, for training; here it only shows its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """With the options, filters and functions that chat templates are written for."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    functions: dict[str, Any] = {"raise_exception": _raise, "strftime_now": _now}
    made.globals.update(functions)
    made.filters["tojson"] = _to_json
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not Jinja's own, which is made for HTML."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(format: str) -> str:
    return datetime.now().strftime(format)


class Renderer:
    def __init__(self, sources: Mapping[str, str], *, max_characters: int) -> None:
        """Raises jinja2.TemplateError."""
        made = environment()
        self._templates = {name: made.from_string(source) for name, source in sources.items()}
        self._max_characters = max_characters

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        parts, characters = list[str](), 0
        for part in self._templates[name].generate(variables):
            characters += len(part)
            if characters > self._max_characters:
                raise TooLong(f"it makes more than {self._max_characters} characters of the chat")
            parts.append(part)
        return "".join(parts)


def _problem(error: Exception) -> dict[str, str]:
    match error:
        case MemoryError():
            text = "it takes too much memory"
        case jinja2.TemplateError() | TooLong():
            text = str(error)
        case _:
            text = f"{type(error).__name__}: {error}"
    return {"error": text[:ERROR_CHARACTERS]}


def _tell(answer: Mapping[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    start: dict[str, Any] = json.loads(sys.stdin.readline())
    signal.setitimer(signal.ITIMER_REAL, start["seconds"])  # its signal ends the process
    try:
        renderer = Renderer(start["templates"], max_characters=start["max_characters"])
    except Exception as error:
        _tell(_problem(error))
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    _tell({})
    while line := sys.stdin.readline():
        signal.setitimer(signal.ITIMER_REAL, start["seconds"])
        try:
            asked = json.loads(line)
            answer = {"text": renderer.render(asked["template"], asked["variables"])}
        except Exception as error:  # whatever a template does
            answer = _problem(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _tell(answer)


if __name__ == "__main__":
    main()
