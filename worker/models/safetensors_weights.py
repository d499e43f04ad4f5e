"""Tensors of a Hugging Face folder: one safetensors file, or shards with an index."""

import json
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stemserve.worker.models.errors import WeightsError
from stemserve.worker.models.model_config import ModelConfig

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class _OpenFile(Protocol):
    def keys(self) -> Iterable[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


class SafetensorsWeights:
    """Tensors of open safetensors files."""

    def __init__(self, folder: Path, files: Sequence[_OpenFile]) -> None:
        self.source = str(folder)
        self._file_of = {name: file for file in files for name in list(file.keys())}

    def names(self) -> Sequence[str]:
        return list(self._file_of)

    def read(self, name: str, config: ModelConfig) -> Tensor:
        return self._file_of[name].get_tensor(name)


@contextmanager
def open_safetensors(folder: Path) -> Generator[SafetensorsWeights]:
    with ExitStack() as stack:
        files: list[_OpenFile] = []
        for path in _weight_files(folder):
            try:
                file = cast("_OpenFile", stack.enter_context(safe_open(path, framework="pt")))
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{path} is not a readable safetensors file: {error}") from error
            files.append(file)
        yield SafetensorsWeights(folder, files)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            shards = {str(shard) for shard in json.loads(index.read_text())["weight_map"].values()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index} holds no weight_map of tensors to files") from error
        return [folder / shard for shard in sorted(shards)]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    raise WeightsError(
        f"{folder} holds neither {_SINGLE} nor {_INDEX} nor a GGUF file, but {found}; "
        "weights are read from safetensors and GGUF only (never from pickle files such as "
        "pytorch_model.bin: convert those with transformers' save_pretrained)"
    )
