"""Build the image for a CPU with buildah, and run commands in it as an engine would.

Without a registry the base is Debian by debootstrap: IMAGE_BASE names another image instead.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache/image"
SUITE = "bookworm"  # whose Python is the one of requirements/cpu.txt
PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"
PROGRAMS = ("buildah", "debootstrap", "unshare", "nsenter", "ip", "apt-get")
TAG = "stemserve:check"
REVISION = "0123456789abcdef"
PIP_KEYS = ("index-url", "extra-index-url", "find-links", "trusted-host")
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
BUILD_S = 3000
RUN_S = 120


def lacking() -> str | None:
    """Why no image can be built here, or None if one can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if "IMAGE_BASE" in os.environ and "debootstrap" in missing:
        missing.remove("debootstrap")
    return f"needs {', '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Buildah:
    """With a store of its own in a folder."""

    store: Path

    def __call__(self, *words: object, cwd: Path = ROOT) -> str:
        store = ("--root", self.store / "root", "--runroot", self.store / "run")
        command = ["buildah", "--storage-driver", "vfs", *map(str, (*store, *words))]
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=BUILD_S, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()


def base_image(buildah: Buildah) -> str:
    """The name of an image with Python."""
    if given := os.environ.get("IMAGE_BASE"):
        return given
    archive = CACHE / f"base-{SUITE}.tar"
    if not archive.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        folder = buildah.store / "base"
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(folder)]
        done = subprocess.run([*command, _mirror()], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        subprocess.run(["tar", "-C", folder, "-cf", archive.with_suffix(".part"), "."], check=True)
        archive.with_suffix(".part").rename(archive)
        shutil.rmtree(folder)
    recipe = buildah.store / "Base"
    recipe.write_text(f'FROM scratch\nADD {archive.name} /\nCMD ["python"]\n')
    buildah("build", "--isolation", "chroot", "-f", recipe, "-t", "python-base", CACHE)
    return "localhost/python-base"


def _mirror() -> str:
    """Of Debian, as this machine's apt has it."""
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(SITE)"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    sites = [
        site for release, part, site in map(str.split, lines) if (release, part) == (SUITE, "main")
    ]
    return next(
        (site for site in sites if site.endswith("/debian")), "http://deb.debian.org/debian"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipSettings:
    """How this machine's pip reaches packages, for a build."""

    text: str  # pip.conf
    folders: tuple[str, ...]  # that it names

    @classmethod
    def here(cls) -> "PipSettings":
        done = subprocess.run(
            [sys.executable, "-m", "pip", "config", "list"],
            capture_output=True,
            text=True,
            check=True,
        )
        found = dict(re.findall(r"^(?:global|:env:)\.([a-z-]+)='(.*)'$", done.stdout, re.MULTILINE))
        kept = {key: value.replace("\\n", " ") for key, value in found.items() if key in PIP_KEYS}
        words = [word.removeprefix("file://") for value in kept.values() for word in value.split()]
        lines = ["[global]", *(f"{key} = {value}" for key, value in kept.items())]
        lines.append("cert = /run/secrets/ca")
        # An index names files beside it.
        folders = {word.removesuffix("/simple") for word in words if word.startswith("/")}
        return cls(text="\n".join(lines) + "\n", folders=tuple(sorted(folders)))


def build(buildah: Buildah) -> str:
    """The image's id. Packages come as this machine's pip finds them, through secrets."""
    settings = PipSettings.here()
    pip_conf = buildah.store / "pip.conf"
    pip_conf.write_text(settings.text)
    bundle = os.environ.get("PIP_CERT", CA_BUNDLE)
    volumes = [f"--volume={folder}:{folder}:ro" for folder in settings.folders]
    return buildah(
        *("build", "--isolation", "chroot", "--format", "docker", "--layers=false", "--quiet"),
        *("-f", "deploy/Dockerfile", "--ignorefile", "deploy/Dockerfile.dockerignore"),
        *("--target", "cpu", "--build-arg", f"CPU_BASE={base_image(buildah)}"),
        *("--build-arg", f"REVISION={REVISION}", *_torch_index(settings)),
        *(
            "--secret",
            f"id=pip,src={buildah.store / 'pip.conf'}",
            "--secret",
            f"id=ca,src={bundle}",
        ),
        *(*volumes, "-t", TAG, "."),
    )


def _torch_index(settings: PipSettings) -> tuple[str, ...]:
    """None where this machine has PyTorch's wheel in a folder."""
    held = any(any(Path(folder).glob("torch-*+cpu-*.whl")) for folder in settings.folders)
    return ("--build-arg", "TORCH_INDEX=") if held else ()


ENTER = """\
set -e
ip link set lo up
mount --make-rprivate /
mount --bind "$1" "$1"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -t tmpfs tmpfs "$1/tmp"
mount --bind "$2" "$1/home/stemserve/.cache"
mount --bind "$3" "$1/mnt"
mount -o remount,bind,ro "$1"
mount -o remount,bind,ro "$1/mnt"
root=$1
shift 3
exec chroot "$root" "$@"
"""
# What `--user`, `--cap-drop ALL` and `no-new-privileges` do; setpriv is the image's own.
AS_USER = (
    *("setpriv", "--reuid=10001", "--regid=10001", "--clear-groups"),
    *("--bounding-set=-all", "--no-new-privs"),
)


@dataclass(kw_only=True)
class Container:
    """One that runs: no network but loopback, a read-only root, no privileges, weights at /mnt."""

    root: Path  # of its files
    config: dict[str, Any]  # the image's
    cache: Path
    weights: Path
    process: "subprocess.Popen[bytes] | None" = None

    def start(self, *words: str) -> None:
        """The entry point with these words."""
        command = ["unshare", "--mount", "--net", "sh", "-c", ENTER, "enter"]
        command += [str(self.root), str(self.cache), str(self.weights)]
        self.process = subprocess.Popen(
            [*command, *self._as_user(*self.config["Entrypoint"], *words)],
            stdout=subprocess.DEVNULL,
        )

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """A command beside it."""
        assert self.process is not None
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--net", "--root", "--wd"]
        return subprocess.run(
            [*enter, *self._as_user(*words)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def _as_user(self, *words: str) -> Sequence[str]:
        return ["env", "-i", *self.config["Env"], *AS_USER, *words]

    def healthy(self) -> "subprocess.CompletedProcess[str]":
        """As an engine asks."""
        kind, *command = self.config["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.run(*command)

    def wait_healthy(self, seconds: float) -> None:
        assert self.process is not None
        end = time.monotonic() + seconds
        while (answer := self.healthy()).returncode:
            assert self.process.poll() is None, f"it ended with {self.process.returncode}"
            assert time.monotonic() < end, answer.stderr
            time.sleep(0.5)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@functools.cache
def bytes_below(folder: Path) -> int:
    return sum(file.lstat().st_size for file in files_below(folder))


def files_below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)
