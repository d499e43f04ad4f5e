"""`python -m stemserve.worker calibrate`: measures the cost table of a model's heads."""

import argparse
import logging
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from stemserve.kernels.layout import HeadShape
from stemserve.kernels.pricing.calibration import Progress, measure_cost_table, plan_for
from stemserve.kernels.pricing.common_hosts import with_common_hosts
from stemserve.kernels.pricing.cost_table_file import tables_json
from stemserve.worker.argument_types import positive
from stemserve.worker.config import ConfigError, Device, Dtype
from stemserve.worker.device_choice import pick_device, pick_dtype
from stemserve.worker.models.loader import read_model_config

log = logging.getLogger(__name__)

PROGRESS_LINES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    model: Path | None
    heads: list[HeadShape]
    output: Path
    dtype: Dtype
    device: Device
    threads: int | None
    quick: bool

    def __post_init__(self) -> None:
        if (self.model is None) == (not self.heads):
            raise ConfigError("give --model or --heads")
        if self.model is not None and not self.model.exists():
            raise ConfigError(f"--model {self.model} does not exist")
        if self.output.is_dir():
            raise ConfigError(f"--output {self.output} is a folder; name a file in it")
        if not self.output.parent.is_dir():
            raise ConfigError(f"--output {self.output}: there is no folder {self.output.parent}")
        if not os.access(self.output.parent, os.W_OK):
            raise ConfigError(f"--output {self.output}: {self.output.parent} cannot be written")


def calibrate(arguments: Sequence[str]) -> int:
    """Raises ConfigError or ModelError."""
    config = CalibrateConfig(**vars(_parser().parse_args(arguments)))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    heads, checkpoint_dtype = config.heads, None
    if config.model is not None:
        model = read_model_config(config.model)
        heads, checkpoint_dtype = [model.heads], model.checkpoint_dtype
    dtype = pick_dtype(config.dtype, device) or checkpoint_dtype or torch.float32
    plan = plan_for(device, quick=config.quick)
    with _progress() as progress:
        measured = [measure_cost_table(shape, device, dtype, progress, plan) for shape in heads]
    try:
        config.output.write_text(tables_json(with_common_hosts(measured)))
    except OSError as error:
        raise ConfigError(f"--output {config.output}: {error.strerror}") from error
    log.info("wrote %s; use it with --cost-table", config.output)
    return 0


@contextmanager
def _progress() -> Generator[Progress]:
    """A bar in a terminal, else a line now and then."""
    if not sys.stderr.isatty():
        yield _log_progress
        return
    console = Console(stderr=True)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressBar(*columns, console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _log_progress(done: int, total: int) -> None:
    if done % max(1, total // PROGRESS_LINES) == 0:
        log.info("measured %d of %d points", done, total)


def head_shape(text: str) -> HeadShape:
    """16/8/128: query heads, KV heads, head_dim."""
    query_heads, kv_heads, head_dim = map(int, text.split("/"))
    if min(query_heads, kv_heads, head_dim) < 1:
        raise ValueError(text)
    return HeadShape(
        query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5
    )


head_shape.__name__ = "shape of heads"  # argparse names the type in its message


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
        metavar="PATH",
        help="Hugging Face folder, config.json or GGUF file; only its heads are read",
    )
    parser.add_argument(
        "--heads",
        type=head_shape,
        action="append",
        default=[],
        metavar="16/8/128",
        help="query heads, KV heads and head_dim, instead of a model; may be given several times",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file")
    parser.add_argument("--dtype", type=Dtype, choices=list(Dtype), default=Dtype.AUTO)
    parser.add_argument("--device", type=Device, choices=list(Device), default=Device.AUTO)
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads of torch")
    parser.add_argument("--quick", action="store_true", help="fewer points: rougher, faster")
    return parser
