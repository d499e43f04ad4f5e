"""Makes a model ready to run from a path."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import assert_never

import torch

from stemserve.worker.models.dummy_weights import fill_with_random
from stemserve.worker.models.errors import ConfigError
from stemserve.worker.models.fixed_torch_ops import FixedTorchOps
from stemserve.worker.models.gguf_config import read_gguf_config
from stemserve.worker.models.gguf_file import GgufFile
from stemserve.worker.models.hf_config import read_hf_config
from stemserve.worker.models.layer_ops import LayerOps
from stemserve.worker.models.model_config import ModelConfig
from stemserve.worker.models.parameters import allocate, checkpoint_slots
from stemserve.worker.models.safetensors_weights import open_safetensors
from stemserve.worker.models.torch_ops import TorchOps
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.models.weights import Progress, fill

_CONFIG = "config.json"
_GGUF = ".gguf"

MakeOps = Callable[[ModelConfig, torch.device], LayerOps]


class LoadFormat(StrEnum):
    AUTO = "auto"  # what the path holds: safetensors or GGUF
    DUMMY = "dummy"  # random weights; only the description is read


def no_progress(done: int, total: int) -> None:
    pass


def load_model(
    path: Path,
    *,
    load_format: LoadFormat = LoadFormat.AUTO,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
    make_ops: MakeOps | None = None,
) -> Transformer:
    """A model from a Hugging Face folder, its config.json (dummy weights), or a GGUF file.

    Without `dtype` the weights keep the checkpoint's; what is quantised becomes bfloat16.
    Without `make_ops` the device has the operations that are fastest on it.
    """
    gguf_path = find_gguf(path)
    gguf_file = None if gguf_path is None else GgufFile(gguf_path)
    config = (
        read_hf_config(_config_path(path)) if gguf_file is None else read_gguf_config(gguf_file)
    )
    weights = allocate(
        config, dtype or config.checkpoint_dtype or torch.float32, torch.device(device)
    )
    slots = checkpoint_slots(config, weights)
    match load_format:
        case LoadFormat.DUMMY:
            fill_with_random(slots, progress)
        case LoadFormat.AUTO if gguf_file is not None:
            # Here, so that hosts that serve safetensors do without the gguf package.
            from stemserve.worker.models.gguf_weights import GgufWeights

            fill(slots, GgufWeights(gguf_file), config, progress)
        case LoadFormat.AUTO:
            with open_safetensors(path) as source:
                fill(slots, source, config, progress)
        case _:
            assert_never(load_format)
    slots.clear()
    make_ops = make_ops or fastest_ops
    return Transformer(config, weights, make_ops(config, weights.embedding.device))


def fastest_ops(config: ModelConfig, device: torch.device) -> LayerOps:
    if device.type != "cuda":
        return TorchOps(config, device)
    # Here, so that a host without a GPU does without Triton.
    from stemserve.worker.models.triton_ops import TritonOps

    return TritonOps(config, device)


def fixed_ops(config: ModelConfig, device: torch.device) -> LayerOps:
    """Those whose results for a row do not depend on the other rows."""
    if device.type != "cuda":
        return FixedTorchOps(config, device)
    from stemserve.worker.models.fixed_triton_ops import FixedTritonOps

    return FixedTritonOps(config, device)


def read_model_config(path: Path) -> ModelConfig:
    """What `load_model` would load."""
    gguf_path = find_gguf(path)
    if gguf_path is not None:
        return read_gguf_config(GgufFile(gguf_path))
    return read_hf_config(_config_path(path))


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a folder without config.json."""
    if path.suffix == _GGUF:
        return path
    if not path.is_dir() or (path / _CONFIG).exists():
        return None
    files = sorted(path.glob(f"*{_GGUF}"))
    if len(files) == 1:
        return files[0]
    raise ConfigError(
        f"{path} has no {_CONFIG} and {len(files)} GGUF files; expected a Hugging Face folder, "
        "or one GGUF file"
    )


def _config_path(path: Path) -> Path:
    if path.is_dir():
        return path / _CONFIG
    if path.name == _CONFIG:
        return path
    raise ConfigError(f"{path} is not a folder, a {_CONFIG} or a {_GGUF} file")
