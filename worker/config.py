"""The worker's configuration: its command line, read once and checked whole."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from stemserve.json_log import FORMATS as LOG_FORMATS
from stemserve.kernels.strategy import Kernel
from stemserve.worker.argument_types import fraction, positive, share
from stemserve.worker.models.loader import LoadFormat
from stemserve.worker.network_flags import add_health, add_tls
from stemserve.worker.tls import TlsFiles

PAGE_SIZE = 16
SAMPLER_SLOTS = 1024
GPU_MEMORY_UTILIZATION = 0.9
CPU_STEP_TOKENS = 32_768
GPU_STEP_TOKENS = 9_216  # what memory is measured with; a service asks for no more by itself
GPU_BURST_STEPS = 8
PROGRAM = "python -m stemserve.worker"
LOG_LEVELS = ("debug", "info", "warning", "error")

DESCRIPTION = """\
Run one worker: a model, its KV cache and its kernels on one GPU or on the CPU.
A service (stemserve serve) connects to it; it speaks gRPC and answers once the model is loaded.
`stemserve worker --config FILE` takes model and worker settings from a server's settings file.
`python -m stemserve.worker calibrate --help`: measure costs for --cost-table."""


class Device(StrEnum):
    AUTO = "auto"  # a GPU if there is one
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    AUTO = "auto"  # float32 on a CPU, the checkpoint's on a GPU
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class KvCacheDtype(StrEnum):
    AUTO = "auto"  # the model's
    FP8_E4M3 = "fp8_e4m3"


class ConfigError(ValueError):
    """The worker cannot start as it was told to; the message says why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    listen: str  # unix:/path or host:port
    model: Path
    load_format: LoadFormat
    dtype: Dtype
    device: Device
    kv_pages: int | None
    kv_memory_bytes: int | None
    gpu_memory_utilization: float
    kv_cache_dtype: KvCacheDtype
    page_size: int
    threads: int | None
    max_step_tokens: int | None  # None: by the device
    sampler_slots: int
    max_burst_steps: int | None  # None: by the device
    kernel: Kernel | None
    deterministic: bool
    cuda_graphs: bool
    kernel_probe_rate: float
    cost_table: Path | None
    parent_fd: int | None
    log_level: str
    log_format: str
    tls: TlsFiles | None  # None: plaintext
    health_listen: str | None  # host:port
    step_timeout_s: float  # then liveness is NOT_SERVING

    def __post_init__(self) -> None:
        if self.tls is not None and self.unix_path is not None:
            raise ConfigError("--tls-certificate is for --listen HOST:PORT, not for unix:/path")
        if self.tls is not None and (missing := self.tls.missing()):
            raise ConfigError(f"{missing} is not a file")
        if self.unix_path is None and not re.fullmatch(r".+:\d{1,5}", self.listen):
            raise ConfigError(f"--listen {self.listen!r} is neither unix:/path nor host:port")
        if self.health_listen is not None and not re.fullmatch(r".+:\d{1,5}", self.health_listen):
            raise ConfigError(f"--health-listen {self.health_listen!r} is not host:port")
        if not self.model.exists():
            raise ConfigError(f"--model {self.model} does not exist")
        if self.deterministic and self.kernel is not None:
            raise ConfigError("--deterministic has its own attention; it goes without --kernel")
        if self.deterministic and self.kv_cache_dtype is not KvCacheDtype.AUTO:
            raise ConfigError("--deterministic needs --kv-cache-dtype auto")
        if self.cost_table is not None and not self.cost_table.is_file():
            raise ConfigError(f"--cost-table {self.cost_table} is not a file")

    @property
    def unix_path(self) -> Path | None:
        return Path(self.listen[5:]) if self.listen.startswith("unix:/") else None


def parse_config(arguments: Sequence[str], *, program: str = PROGRAM) -> WorkerConfig:
    """Raises ConfigError; unknown flags and --help end the process, as argparse does."""
    values = vars(_parser(program).parse_args(arguments))
    tls = _tls_files(
        values.pop("tls_certificate"), values.pop("tls_private_key"), values.pop("tls_client_ca")
    )
    return WorkerConfig(**values, tls=tls)


def _tls_files(
    certificate: Path | None, private_key: Path | None, client_ca: Path | None
) -> TlsFiles | None:
    if certificate is None and private_key is None and client_ca is None:
        return None
    if certificate is None or private_key is None:
        raise ConfigError("TLS needs both --tls-certificate and --tls-private-key")
    return TlsFiles(certificate=certificate, private_key=private_key, client_ca=client_ca)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model(parser)
    _add_cache(parser)
    _add_limits(parser)
    _add_kernels(parser)
    add_tls(parser)
    add_health(parser)
    _add_process(parser)
    return parser


def _add_process(parser: argparse.ArgumentParser) -> None:
    process = parser.add_argument_group("process")
    process.add_argument(
        "--listen",
        required=True,
        metavar="ADDRESS",
        help="unix:/path.sock (made with mode 0600) or host:port",
    )
    process.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads of torch (default: torch's)"
    )
    process.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="least severe log lines to write (default: %(default)s)",
    )
    process.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="json: one object a line (default: %(default)s)",
    )
    process.add_argument(
        "--parent-fd",
        type=int,
        metavar="FD",
        help="inherited pipe; the worker ends when its other end closes",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="PATH",
        help="Hugging Face folder, GGUF file, or config.json with --load-format dummy",
    )
    group.add_argument(
        "--load-format",
        type=LoadFormat,
        choices=list(LoadFormat),
        default=LoadFormat.AUTO,
        help="auto: the file's weights; dummy: random weights (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        type=Dtype,
        choices=list(Dtype),
        default=Dtype.AUTO,
        help="auto: float32 on a CPU, the checkpoint's on a GPU (default: %(default)s)",
    )
    group.add_argument(
        "--device",
        type=Device,
        choices=list(Device),
        default=Device.AUTO,
        help="auto: a GPU if there is one (default: %(default)s)",
    )


def _add_cache(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV cache")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--kv-pages", type=positive, metavar="N", help="pages of the KV cache")
    size.add_argument(
        "--kv-memory-bytes",
        type=positive,
        metavar="N",
        help="bytes of the KV cache (default: what a GPU has left; on a CPU a share of the memory)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=fraction,
        default=GPU_MEMORY_UTILIZATION,
        metavar="PART",
        help="of a GPU's memory, for weights, steps and KV cache together (default: %(default)s)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        type=KvCacheDtype,
        choices=list(KvCacheDtype),
        default=KvCacheDtype.AUTO,
        help="numbers of the KV cache; fp8_e4m3 halves or quarters its bytes and rounds to 4 bits "
        "(default: %(default)s, the model's)",
    )
    group.add_argument(
        "--page-size",
        type=positive,
        default=PAGE_SIZE,
        metavar="N",
        help="tokens of a page; 8, 16, 32 or 64 on a GPU (default: %(default)s)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-step-tokens",
        type=positive,
        metavar="N",
        help="rows of one step; a larger plan is refused "
        f"(default: {GPU_STEP_TOKENS} on a GPU, {CPU_STEP_TOKENS} on a CPU)",
    )
    group.add_argument(
        "--sampler-slots",
        type=positive,
        default=SAMPLER_SLOTS,
        metavar="N",
        help="sequences that may be sampled at a time (default: %(default)s)",
    )
    group.add_argument(
        "--max-burst-steps",
        type=positive,
        metavar="N",
        help="decode steps that the service may send at once (default: "
        f"{GPU_BURST_STEPS} on a GPU, 1 on a CPU)",
    )


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("attention kernels")
    group.add_argument(
        "--kernel",
        type=Kernel,
        choices=list(Kernel),
        metavar="NAME",
        help=f"use this strategy wherever it can run, for debugging: {', '.join(Kernel)}",
    )
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="results that do not depend, bit for bit, on what runs beside them or on the cache",
    )
    group.add_argument(
        "--no-cuda-graphs",
        dest="cuda_graphs",
        action="store_false",
        help="launch every kernel by itself; slower, for debugging",
    )
    group.add_argument(
        "--kernel-probe-rate",
        type=share,
        default=0.0,
        metavar="PART",
        help="of the steps, after which an idle worker on a CPU times the next best attention too "
        "(default: %(default)s, never)",
    )
    group.add_argument(
        "--cost-table",
        type=Path,
        metavar="FILE",
        help="costs that the choice of kernel uses (default: those of the device)",
    )
