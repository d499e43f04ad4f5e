"""The chat template that a model came with, and the special tokens that it may name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

DEFAULT = "default"
WITH_TOOLS = "tool_use"
TOKEN_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    sources: Mapping[str, str]  # Jinja by name; DEFAULT, and WITH_TOOLS where the model has one
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])  # as bos_token: <s>

    def name(self, *, with_tools: bool) -> str:
        return WITH_TOOLS if with_tools and WITH_TOOLS in self.sources else DEFAULT


def chat_template(value: Any, tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Of a text, or of a list of named ones, as tokenizer_config.json holds them."""
    match value:
        case str():
            sources = {DEFAULT: value}
        case [*entries]:
            sources = dict(_named(entries))
        case _:
            return None
    return ChatTemplate(sources=sources, tokens=tokens) if DEFAULT in sources else None


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer_config.json by the names that templates use."""
    found = dict[str, str]()
    for name in TOKEN_NAMES:
        match config.get(name):
            case str(text) | {"content": str(text)}:
                found[name] = text
            case _:
                pass
    return found


def _named(entries: Iterable[Any]) -> Iterable[tuple[str, str]]:
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(source)}:
                yield name, source
            case _:
                pass
