"""The chart's init container that fetches a model: the script, against a real HTTP server."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.deploy.chart import CHART

SCRIPT = CHART / "files" / "fetch_model.py"
WEIGHTS = bytes(range(256)) * 9_000


@dataclass
class Store:
    """A store of files that redirects to its content, and what it was asked."""

    url: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            store.asked.append((self.path, self.headers["Authorization"]))
            moved = self.path.startswith("/repo/")
            self.send_response(302 if moved else 200)
            if moved:
                self.send_header("Location", f"{store.url}/content")
            self.send_header("Content-Length", str(0 if moved else len(WEIGHTS)))
            self.end_headers()
            self.wfile.write(b"" if moved else WEIGHTS)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        store.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield store
        server.shutdown()
        thread.join()


def fetch(folder: Path, url: str, sha256: str, token: str = "") -> subprocess.CompletedProcess[str]:
    listing = folder.parent / "files.json"
    listing.write_text(json.dumps([{"name": "m.gguf", "url": url, "sha256": sha256}]))
    return subprocess.run(
        [sys.executable, SCRIPT, listing, folder],
        env={"MODEL_TOKEN": token},
        capture_output=True,
        text=True,
    )


def test_a_file_is_fetched_once_and_its_token_stays_with_its_host(
    store: Store, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    for _ in range(2):
        done = fetch(folder, f"{store.url}/repo/m.gguf", digest, token="secret")
        assert done.returncode == 0, done.stderr
        assert "secret" not in done.stdout + done.stderr
    assert (folder / "m.gguf").read_bytes() == WEIGHTS
    assert store.asked == [("/repo/m.gguf", "Bearer secret"), ("/content", None)]
    assert [path.name for path in folder.iterdir()] == ["m.gguf"]


def test_a_file_of_another_hash_is_refused_and_left_nowhere(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    done = fetch(folder, f"{store.url}/content", "0" * 64)
    assert done.returncode == 1
    assert "has sha256" in done.stderr
    assert not list(folder.iterdir())
