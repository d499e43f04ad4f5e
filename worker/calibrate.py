"""`python -m stemserve.worker calibrate`: measures the cost table of a model's heads."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stemserve.kernels.calibration import measure_cost_table
from stemserve.kernels.cost_table_file import tables_json
from stemserve.worker.config import ConfigError, Device, Dtype, positive
from stemserve.worker.models.loader import read_model_config
from stemserve.worker.start import pick_device, pick_dtype

log = logging.getLogger(__name__)

PROGRESS_LINES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    model: Path
    output: Path
    dtype: Dtype
    device: Device
    threads: int | None

    def __post_init__(self) -> None:
        if not self.model.exists():
            raise ConfigError(f"--model {self.model} does not exist")
        if not self.output.parent.is_dir():
            raise ConfigError(f"--output {self.output}: there is no folder {self.output.parent}")


def calibrate(arguments: Sequence[str]) -> int:
    """Raises ConfigError or ModelError."""
    config = CalibrateConfig(**vars(_parser().parse_args(arguments)))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    model = read_model_config(config.model)
    dtype = pick_dtype(config.dtype, device) or model.checkpoint_dtype or torch.float32
    table = measure_cost_table(model.heads, device, dtype, _log_progress)
    config.output.write_text(tables_json([table]))
    log.info("wrote %s; use it with --cost-table", config.output)
    return 0


def _log_progress(done: int, total: int) -> None:
    if done % max(1, total // PROGRESS_LINES) == 0:
        log.info("measured %d of %d points", done, total)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stemserve.worker calibrate",
        description="Measure what attention costs on this device, for --cost-table. "
        "Run it on a quiet machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="Hugging Face folder, config.json or GGUF file; only its heads are read",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file")
    parser.add_argument("--dtype", type=Dtype, choices=list(Dtype), default=Dtype.AUTO)
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.AUTO)
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads of torch")
    return parser
