"""Fetch the files of a model and check their hashes; files that are there already are kept.

`fetch_model.py LIST FOLDER`: LIST is JSON, [{"name", "url", "sha256"}]. The environment's
MODEL_TOKEN, if any, is sent as a bearer token.
"""

import hashlib
import json
import os
import sys
import urllib.request
from pathlib import Path

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(url: str, target: Path, token: str) -> None:
    request = urllib.request.Request(url)
    if token:
        # Not to the host that a redirect names: stores of large files have signed addresses.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer, target.open("wb") as file:
        while chunk := answer.read(CHUNK_BYTES):
            file.write(chunk)


def main(listing: Path, folder: Path, token: str) -> None:
    for file in json.loads(listing.read_text()):
        target = folder / file["name"]
        if target.is_file() and digest(target) == file["sha256"]:
            print(f"{target} is there", flush=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        # Replicas may share the folder: each writes its own file, which appears whole.
        part = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}")
        try:
            fetch(file["url"], part, token)
            if (found := digest(part)) != file["sha256"]:
                sys.exit(f"{file['url']} has sha256 {found}, not {file['sha256']}")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        print(f"fetched {target}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), os.environ.get("MODEL_TOKEN", ""))
