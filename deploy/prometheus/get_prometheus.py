"""Put prometheus and promtool, as Debian builds them, into a folder: for tests without a cluster.

python deploy/prometheus/get_prometheus.py .cache/prometheus
"""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from urllib.request import urlopen

POOL = "http://deb.debian.org/debian/pool/main/p/prometheus/"
PACKAGE = "prometheus_2.42.0+ds-5+deb12u1_amd64.deb"
SHA256 = "81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55"
PROGRAMS = ("prometheus", "promtool")
TIMEOUT_S = 60


def main() -> None:
    folder = Path(sys.argv[1])
    if all((folder / name).is_file() for name in PROGRAMS):
        return
    try:
        package = pinned_package()
    except (OSError, ValueError) as error:
        print(f"{POOL}{PACKAGE}: {error}; asking apt", file=sys.stderr)
        try:
            package = apt_package()
        except (OSError, subprocess.CalledProcessError) as refusal:
            sys.exit(f"neither Debian's pool nor apt has Prometheus: {refusal}")
    unpack(package, folder)


def pinned_package() -> bytes:
    """Raises OSError, or ValueError where it is not the one that is known."""
    with urlopen(POOL + PACKAGE.replace("+", "%2B"), timeout=TIMEOUT_S) as answer:
        package: bytes = answer.read()
    digest = hashlib.sha256(package).hexdigest()
    if digest != SHA256:
        raise ValueError(f"its SHA-256 is {digest}, not {SHA256}")
    return package


def apt_package() -> bytes:
    """What the machine's own, signed, lists name."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, check=True)
        return next(Path(folder).glob("*.deb")).read_bytes()


def unpack(package: bytes, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data_member(package))) as files:
        for name in PROGRAMS:
            program = files.extractfile(f"./usr/bin/{name}")
            if program is None:
                raise ValueError(f"the package has no {name}")
            unfinished = folder / f"{name}.part"
            with unfinished.open("wb") as target:
                shutil.copyfileobj(program, target)
            unfinished.chmod(0o755)
            unfinished.rename(folder / name)


def data_member(package: bytes) -> bytes:
    """A .deb is an ar archive: headers of 60 bytes, members padded to even sizes."""
    at = 8
    while at < len(package):
        name = package[at : at + 16].decode().strip()
        size = int(package[at + 48 : at + 58])
        if name.startswith("data.tar"):
            return package[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise ValueError("the package has no files")


if __name__ == "__main__":
    main()
