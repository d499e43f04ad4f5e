"""Read the metadata of a GGUF file, without its tensors."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

Value = bool | int | float | str | list["Value"]

MAGIC = b"GGUF"
OLDEST_VERSION = 2  # version 1 has 32-bit counts
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
WIDE_SCALARS = {10: "<Q", 11: "<q", 12: "<d"}
STRING = 8
ARRAY = 9
FORMATS: Mapping[int, str] = SCALARS | WIDE_SCALARS


def read_gguf_metadata(path: Path) -> dict[str, Value]:
    """Raises ValueError where the file is not a GGUF file that this reader knows."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ValueError(f"{path} is not a GGUF file")
        version = _scalar(file, "<I")
        if version < OLDEST_VERSION:
            raise ValueError(f"{path} has GGUF version {version}; version {OLDEST_VERSION} is read")
        _scalar(file, "<Q")  # tensors
        entries = int(_scalar(file, "<Q"))
        try:
            return {_string(file): _value(file, int(_scalar(file, "<I"))) for _ in range(entries)}
        except struct.error as error:
            raise ValueError(f"{path} ends within its metadata") from error


def _value(file: BinaryIO, kind: int) -> Value:
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        return _array(file)
    if kind in FORMATS:
        return _scalar(file, FORMATS[kind])
    raise ValueError(f"unknown GGUF value type {kind}")


def _array(file: BinaryIO) -> list[Value]:
    kind = int(_scalar(file, "<I"))
    count = int(_scalar(file, "<Q"))
    if kind in FORMATS:
        code = FORMATS[kind]
        width = struct.calcsize(code)
        return list(struct.unpack(f"<{count}{code[1]}", file.read(count * width)))
    return [_value(file, kind) for _ in range(count)]


def _scalar(file: BinaryIO, code: str) -> int | float:
    value: int | float = struct.unpack(code, file.read(struct.calcsize(code)))[0]
    return value


def _string(file: BinaryIO) -> str:
    length = int(_scalar(file, "<Q"))
    return file.read(length).decode("utf-8", errors="replace")
