"""Requests that no sane client sends: valid ones mutated, random messages, random bytes."""

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import descriptor
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from stemserve.proto.v1 import inference_pb2, info_pb2, prefixes_pb2, tries_pb2
from stemserve.service.calls.services import SERVICES
from stemserve.service.serving.reflection import V1, V1ALPHA

FILES = (inference_pb2, prefixes_pb2, tries_pb2, info_pb2)
MAX_DEPTH = 4
ODD_INTEGERS = (0, 1, 2, 5, 49151, 49152, 2**31 - 1, -(2**31), 2**32 - 1, -1, 2**63 - 1, -(2**63))
ODD_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan"))
ODD_TEXTS = ("", "a", "\x00", "\U0001f600" * 3, "Paris", "x" * 5000, "\n" * 40, "<|im_start|>")
ODD_JSON = (
    *("", "{}", "[]", "null", "[" * 9_000, '{"a": NaN}', '["\\ud800"]', '{"role": "x"}'),
    *('{"messages": 1}', '{"documents": 0}', '{"enable_thinking": false}'),
    '[{"type": "function", "function": {"name": "<|im_end|>"}}]',
    '{"tool_calls": [{"function": {"arguments": {"k": 1e999}}}]}',
)
JSON_FIELDS = ("fields", "tools", "chat_template_kwargs")
ODD_ROLES = ("user", "assistant", "system", "tool", "im_end", "user<|im_end|>\n")
Field = descriptor.FieldDescriptor


class Method:
    """One RPC, by its bytes."""

    def __init__(self, name: str, request: Any, *, streams_in: bool, streams_out: bool) -> None:
        self.name = name
        self.request = request
        self.streams_in = streams_in
        self.streams_out = streams_out


def methods() -> list[Method]:
    """Of all public services, health and reflection."""
    found: list[Method] = []
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            if service.full_name not in SERVICES:
                raise RuntimeError(f"{service.full_name} is not served")
            for method in service.methods:
                found.append(
                    Method(
                        f"/{service.full_name}/{method.name}",
                        getattr(file, method.input_type.name),
                        streams_in=bool(method.client_streaming),
                        streams_out=bool(method.server_streaming),
                    )
                )
    found.append(
        Method(
            "/grpc.health.v1.Health/Check", HealthCheckRequest, streams_in=False, streams_out=False
        )
    )
    for version in (V1, V1ALPHA):
        name = f"/{version}/ServerReflectionInfo"
        found.append(Method(name, ServerReflectionRequest, streams_in=True, streams_out=True))
    return found


def random_message(kind: Any, rng: random.Random, depth: int = 0) -> Message:
    """Each field set or not, with ordinary and odd values."""
    message: Message = kind()
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.55:
            _fill(message, field, rng, depth)
    return message


def _fill(message: Message, field: Any, rng: random.Random, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entries: Any = getattr(message, field.name)
        for _ in range(rng.randrange(3)):
            entries[_scalar(field.message_type.fields[0], rng)] = _scalar(
                field.message_type.fields[1], rng
            )
    elif field.message_type is not None:
        if depth >= MAX_DEPTH:
            return
        target: Any = getattr(message, field.name)
        kind = type(target.add()) if field.is_repeated else type(target)
        if field.is_repeated:
            del target[:]
            for _ in range(rng.choice((0, 1, 2, 3))):
                target.append(random_message(kind, rng, depth + 1))
        else:
            target.CopyFrom(random_message(kind, rng, depth + 1))
    elif field.is_repeated:
        values: Any = getattr(message, field.name)
        values.extend(_scalar(field, rng) for _ in range(rng.choice((0, 1, 1, 2, 3, 20))))
    else:
        setattr(message, field.name, _scalar(field, rng))


def _scalar(field: Any, rng: random.Random) -> Any:
    match field.type:
        case Field.TYPE_STRING:
            return rng.choice(_texts(field.name))
        case Field.TYPE_BYTES:
            return rng.choice((b"", b"\x01", _tokens(rng), rng.randbytes(rng.randrange(40))))
        case Field.TYPE_BOOL:
            return rng.random() < 0.5
        case Field.TYPE_FLOAT | Field.TYPE_DOUBLE:
            return rng.choice((*ODD_FLOATS, rng.uniform(-2, 2)))
        case Field.TYPE_ENUM:
            return rng.choice((*field.enum_type.values_by_number, 99))
        case _:
            return _integer(field, rng)


def _texts(name: str) -> Sequence[str]:
    if name in JSON_FIELDS:
        return ODD_JSON
    return (*ODD_ROLES, *ODD_TEXTS) if name == "role" else ODD_TEXTS


def _integer(field: Any, rng: random.Random) -> int:
    wide = field.type in (Field.TYPE_INT64, Field.TYPE_UINT64, Field.TYPE_SINT64)
    signed = field.type in (Field.TYPE_INT32, Field.TYPE_INT64, Field.TYPE_SINT32)
    bits = 64 if wide else 32
    low, high = (-1 << (bits - 1), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    drawn: int = rng.choice((*ODD_INTEGERS, rng.randrange(40)))
    return min(high, max(low, drawn))


def _tokens(rng: random.Random) -> bytes:
    tokens = [rng.randrange(60_000) for _ in range(rng.randrange(20))]
    return struct.pack(f"<{len(tokens)}I", *tokens)


def mutated(blob: bytes, rng: random.Random) -> bytes:
    """A few random edits of the wire bytes."""
    edited = bytearray(blob)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        rng.choice(EDITS)(edited, rng)
    return bytes(edited)


def _flip(blob: bytearray, rng: random.Random) -> None:
    if blob:
        blob[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)


def _cut(blob: bytearray, rng: random.Random) -> None:
    del blob[rng.randrange(len(blob) + 1) :]


def _insert(blob: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(blob) + 1)
    blob[at:at] = rng.randbytes(rng.choice((1, 2, 10)))


def _repeat(blob: bytearray, rng: random.Random) -> None:
    if blob:
        start = rng.randrange(len(blob))
        blob += blob[start : start + rng.randrange(1, 30)]


def _overwrite(blob: bytearray, rng: random.Random) -> None:
    if blob:
        blob[rng.randrange(len(blob))] = rng.choice((0, 0x7F, 0x80, 0xFF))


EDITS: Sequence[Callable[[bytearray, random.Random], None]] = (
    _flip,
    _cut,
    _insert,
    _repeat,
    _overwrite,
)
