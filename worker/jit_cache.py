"""Where Triton keeps the kernels that it compiles: looked at before anything is compiled, and moved
when the disk is full later.
"""

import errno
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from stemserve.worker.config import ConfigError

log = logging.getLogger(__name__)

NEEDED_BYTES = 8 << 20  # of the kernels of one model
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
OTHERS = (Path(tempfile.gettempdir()), Path("/dev/shm"))


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


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def move_triton_cache(candidates: Iterable[Path] = OTHERS) -> bool:
    """Another folder of this process's own, where there is one with room."""
    # Here, so that a host without a GPU does without Triton.
    from triton import knobs

    for parent in candidates:
        folder = parent / f"stemserve-triton-{os.getpid()}"
        if str(folder) == knobs.cache.dir:
            continue
        try:
            check_folder(folder)
        except ConfigError:
            continue
        log.warning("%s is full; compiled kernels go to %s", knobs.cache.dir, folder)
        knobs.cache.dir = str(folder)
        return True
    return False
