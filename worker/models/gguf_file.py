"""Reads the header of a GGUF file, and maps its tensor data."""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stemserve.worker.models.errors import WeightsError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# struct codes of the value types of GGUF, by their number
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    type_id: int  # GGMLQuantizationType
    shape: tuple[int, ...]  # outermost dimension first, in weights
    offset: int  # bytes from the start of the file


class GgufFile:
    """Metadata and tensor table of a GGUF file (versions 2 and 3, little-endian)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise WeightsError(
                f"{path}: the GGUF header is cut short or damaged at byte {self._at}"
            ) from error

    def data(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        """The raw bytes of a tensor, not copied."""
        start = self.tensors[name].offset
        if start + num_bytes > len(self._map):
            raise WeightsError(f"{self.path} is cut short: {name} ends beyond the file")
        return np.frombuffer(self._map, np.uint8, num_bytes, start)

    def _read_header(self) -> None:
        magic = self._map[:4]
        self._at = 4
        version = self._integer("I")
        if magic != _MAGIC or version not in _VERSIONS:
            raise WeightsError(
                f"{self.path} starts with {magic!r}, version {version}; expected a little-endian "
                f"GGUF file, version 2 or 3"
            )
        num_tensors, num_values = self._integer("Q"), self._integer("Q")
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._integer("I"))
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise WeightsError(f"{self.path}: general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        self.tensors = {
            name: GgufTensor(type_id=type_id, shape=shape, offset=start + offset)
            for name, type_id, shape, offset in table
        }

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._string(), self._integer("I")
        if dimensions > _MAX_DIMENSIONS:
            raise WeightsError(f"{self.path}: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._integer("Q") for _ in range(dimensions))[::-1]
        return name, self._integer("I"), shape, self._integer("Q")

    def _value(self, kind: int) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, length = self._integer("I"), self._integer("Q")
            if item_kind in _SCALARS:
                return list(self._scalars(_SCALARS[item_kind], length))
            return [self._value(item_kind) for _ in range(length)]
        if kind not in _SCALARS:
            raise WeightsError(f"{self.path}: unknown metadata type {kind} at byte {self._at}")
        return self._scalars(_SCALARS[kind], 1)[0]

    def _scalars(self, code: str, length: int) -> tuple[object, ...]:
        layout = f"<{length}{code}"
        values = struct.unpack_from(layout, self._map, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _integer(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self._map, self._at)
        self._at += struct.calcsize(f"<{code}")
        return int(value)

    def _string(self) -> str:
        length = self._integer("Q")
        end = self._at + length
        if end > len(self._map):
            raise struct.error("a string ends beyond the file")
        text = self._map[self._at : end].decode("utf-8")
        self._at = end
        return text
