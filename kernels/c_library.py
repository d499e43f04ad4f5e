"""Compile C sources of this package to a shared library, once for each user of a machine."""

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c99", "-O3", "-fPIC", "-shared", "-ffp-contract=off")
COMPILE_SECONDS = 120
NO_SPACE = os.strerror(errno.ENOSPC)  # as compilers say it


class CLibraryError(RuntimeError):
    """A library could not be made or loaded; the message says what to do."""


def load_library(sources: Sequence[Path], folders: Sequence[Path] | None = None) -> ctypes.CDLL:
    """Load the library of some sources; compile it where no folder has it.

    `sources`: C files first, the first names the library. Folders are tried in turn, so that a
    home that cannot be written or executed, or is full, does not matter.
    """
    name = f"{sources[0].stem}-{_digest(sources)}.so"
    failures: list[str] = []
    for folder in folders or cache_folders():
        try:
            _make_private(folder)
            path = folder / name
            if not path.is_file():
                _compile(sources, path)
            return ctypes.CDLL(str(path))
        except OSError as error:
            failures.append(f"{folder}: {error}")
    raise CLibraryError(
        f"{sources[0].name} cannot be compiled or loaded in any cache folder;"
        f" make one of them writable and executable: {'; '.join(failures)}"
    )


def cache_folders() -> list[Path]:
    """The user's cache, and a folder of the user's own among temporary files."""
    temporary = Path(tempfile.gettempdir()) / f"stemserve-{os.getuid()}"
    try:
        return [Path.home() / ".cache" / "stemserve", temporary]
    except RuntimeError:  # no home
        return [temporary]


def _digest(sources: Sequence[Path]) -> str:
    digest = hashlib.sha256(f"{FLAGS} {platform.machine()} {platform.libc_ver()}".encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _make_private(folder: Path) -> None:
    """Code is loaded from the folder: nobody else may be able to put any there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022 or folder.is_symlink():
        raise PermissionError("it belongs to, or may be written by, somebody else")


def _compile(sources: Sequence[Path], target: Path) -> None:
    """Other processes see the whole library or none. OSError: the folder cannot hold it."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise CLibraryError(
            f"no C compiler ({', '.join(COMPILERS)}) is on the PATH; install one, such as the"
            " package gcc, which Triton needs as well"
        )
    handle, partial = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        files = [str(source) for source in sources if source.suffix == ".c"]
        command = [compiler, *FLAGS, *files, "-o", partial]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        if NO_SPACE in done.stderr:
            raise OSError(errno.ENOSPC, f"{NO_SPACE} for a library")
        if done.returncode:
            raise CLibraryError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
        os.replace(partial, target)
    except subprocess.TimeoutExpired as error:
        raise CLibraryError(f"{compiler} took more than {COMPILE_SECONDS} s") from error
    finally:
        Path(partial).unlink(missing_ok=True)
