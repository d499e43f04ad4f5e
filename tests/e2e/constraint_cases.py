"""Random constraints, each with a check of an output that knows nothing of how it was made."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stemserve.proto.v1 import inference_pb2

Rng = np.random.Generator
Json = Any
TYPES = {
    "integer": int,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
WORDS = ("a", "ab", "b/c", 'say "no"', "é", "日本", "line\nbreak", "\\d+", "<|im_end|>", " x ")


@dataclass(frozen=True, kw_only=True)
class Constrained:
    fields: dict[str, Any]  # of the request
    accepts: Callable[[str], bool]


def random_choice(rng: Rng) -> Constrained:
    count = int(rng.integers(1, len(WORDS)))
    texts: list[str] = rng.choice(WORDS, count, replace=False).tolist()
    return Constrained(
        fields={"choice": inference_pb2.Choices(texts=texts)}, accepts=lambda text: text in texts
    )


def random_regex(rng: Rng) -> Constrained:
    pattern = _pattern(rng, depth=3)
    compiled = re.compile(pattern)
    return Constrained(
        fields={"regex": pattern}, accepts=lambda text: compiled.fullmatch(text) is not None
    )


def random_schema(rng: Rng) -> Constrained:
    schema = _schema(rng, depth=2)

    def accepts(text: str) -> bool:
        return _is_valid(json.loads(text), schema)

    return Constrained(fields={"json_schema": json.dumps(schema)}, accepts=accepts)


def random_grammar(rng: Rng) -> Constrained:
    """Brackets that match, of a few kinds."""
    kinds = ["()", "[]", "{}"][: int(rng.integers(1, 4))]
    inner = " | ".join(f'"{kind[0]}" nest* "{kind[1]}"' for kind in kinds)

    def accepts(text: str) -> bool:
        before = None
        while before != text:
            before = text
            for kind in kinds:
                text = text.replace(kind, "")
        return not text

    return Constrained(fields={"grammar": f"start: nest\nnest: {inner}\n"}, accepts=accepts)


def _pattern(rng: Rng, depth: int) -> str:
    kind = int(rng.integers(0, 6 if depth else 2))
    if kind == 0:
        return "".join(rng.choice(list("abcxyz019_ ")) for _ in range(rng.integers(1, 4)))
    if kind == 1:
        return str(rng.choice(["[a-f]", "[0-9]", "[^a-z]", "[xyz]", r"\.", r"\+"]))
    inner = [_pattern(rng, depth - 1) for _ in range(int(rng.integers(2, 4)))]
    if kind == 2:
        return "(" + "|".join(inner) + ")"
    if kind == 3:
        low = int(rng.integers(0, 3))
        return f"({inner[0]}){{{low},{low + int(rng.integers(1, 4))}}}"
    if kind == 4:
        return f"({inner[0]})?{inner[1]}"
    return "".join(inner)


def _schema(rng: Rng, depth: int) -> dict[str, Json]:
    kind = int(rng.integers(0, 7 if depth else 4))
    if kind == 0:
        low = int(rng.integers(-50, 50))
        return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 500))}
    if kind == 1:
        return {"type": "string", "maxLength": int(rng.integers(1, 6))}
    if kind == 2:
        return {"enum": [str(word) for word in rng.choice(WORDS, 3, replace=False)] + [None, 7]}
    if kind == 3:
        return {"type": "boolean"}
    if kind == 4:
        low = int(rng.integers(0, 2))
        items = _schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
    if kind == 5:
        return {"anyOf": [_schema(rng, depth - 1), {"type": "null"}]}
    names = [f"p{number}" for number in range(int(rng.integers(1, 4)))]
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": names[: int(rng.integers(0, len(names) + 1))],
        "additionalProperties": False,
    }


def _is_valid(value: Json, schema: dict[str, Json]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(_is_valid(value, each) for each in schema["anyOf"])
    kind: type = TYPES[schema["type"]]
    return type(value) is kind and _fits(value, schema)


def _fits(value: Json, schema: dict[str, Json]) -> bool:
    match schema["type"]:
        case "integer":
            return bool(schema["minimum"] <= value <= schema["maximum"])
        case "string":
            return bool(len(value) <= schema["maxLength"])
        case "array":
            counts = range(schema["minItems"], schema["maxItems"] + 1)
            return len(value) in counts and all(_is_valid(v, schema["items"]) for v in value)
        case "object":
            properties = schema["properties"]
            return set(schema["required"]) <= set(value) <= set(properties) and all(
                _is_valid(each, properties[name]) for name, each in value.items()
            )
        case _:
            return True
