"""Run what a rendered pod runs: its volumes as folders, its words, and the names of its cluster."""

import re
import shutil
import socket
import socketserver
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.chart import Object, the

PIECE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The one container of a pod template, as a kubelet would start it."""

    folder: Path
    words: list[str]  # of the image's entry point; mounts are folders below `folder`


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What the cluster has by name."""

    objects: list[Object]
    secrets: Mapping[str, Path]
    claims: Mapping[str, Path]


def place(name: str, template: Object, outside: Outside, folder: Path) -> Pod:
    """The pod `name`, its volumes in place. Fails where the pod has a volume of another kind."""
    (part,) = template["spec"]["containers"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    paths = {m["mountPath"]: folder / m["name"] for m in part["volumeMounts"]}
    pattern = re.compile("|".join(sorted(map(re.escape, paths), key=len, reverse=True)))

    def here(text: str) -> str:
        return pattern.sub(lambda found: str(paths[found[0]]), text)

    for mount in part["volumeMounts"]:
        _fill(paths[mount["mountPath"]], volumes[mount["name"]], outside)
    for file in (folder / "config").iterdir():
        file.write_text(here(file.read_text()))
    known = {
        each["name"]: each.get("value", name)
        for each in part["env"]
        if each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "metadata.name")
        == "metadata.name"
    }
    words = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in part["args"]]
    return Pod(folder=folder, words=[here(word) for word in words])


def _fill(folder: Path, volume: Object, outside: Outside) -> None:
    folder.mkdir(parents=True)
    if "configMap" in volume:
        data = the(outside.objects, "ConfigMap", volume["configMap"]["name"])["data"]
        for name, text in data.items():
            (folder / name).write_text(text)
    elif "secret" in volume:
        shutil.copytree(outside.secrets[volume["secret"]["secretName"]], folder, dirs_exist_ok=True)
    elif "persistentVolumeClaim" in volume:
        claim = outside.claims[volume["persistentVolumeClaim"]["claimName"]]
        shutil.copytree(claim, folder, dirs_exist_ok=True)
    else:
        assert "emptyDir" in volume, volume


class Names(socketserver.ThreadingTCPServer):
    """The cluster's names, for gRPC, which takes this for an HTTP proxy: CONNECT NAME:PORT leads
    to a port of this machine. So clients dial, and check certificates for, the names themselves."""

    daemon_threads = True

    def __init__(self, known: Mapping[str, int]) -> None:
        """`known`: NAME:PORT -> port here."""
        super().__init__(("127.0.0.1", 0), _Tunnel)
        self.known = known
        self.asked: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def answering(self) -> Generator[None]:
        thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            thread.join()
            self.server_close()


class _Tunnel(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Names)
        name = self.rfile.readline().decode().split()[1]
        while self.rfile.readline().strip():
            pass  # headers
        self.server.asked.add(name)
        here = ("127.0.0.1", self.server.known[name])
        with suppress(OSError), socket.create_connection(here) as there:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_pass_on, args=(there, self.connection))
            back.start()
            _pass_on(self.connection, there)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
