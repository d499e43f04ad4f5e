"""Where Triton keeps the kernels that it compiles: looked at before anything is compiled."""

import tempfile
from pathlib import Path

from stemserve.worker.config import ConfigError

NEEDED_BYTES = 8 << 20  # of the kernels of one model


def check_folder(folder: Path) -> None:
    """Raises ConfigError where compiled kernels cannot be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(NEEDED_BYTES))
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot keep compiled kernels ({error.strerror}): make room there, or name "
            "another folder in TRITON_CACHE_DIR"
        ) from error


def check_triton_cache() -> None:
    # Here, so that a host without a GPU does without Triton.
    from triton import knobs

    check_folder(Path(knobs.cache.dir))
