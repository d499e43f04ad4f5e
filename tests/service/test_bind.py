"""What is said where a server cannot listen."""

import socket

import grpc
import pytest

from stemserve.service.serving.server import PortInUse, bind


async def test_a_host_that_is_no_name_is_not_taken_for_a_port_in_use() -> None:
    host = "x" * 64  # longer than a part of a name may be
    with pytest.raises(PortInUse, match=f"'{host}' names no address here"):
        bind(grpc.aio.server(), host, 0, "--port")


async def test_a_port_in_use_names_its_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}: is another server.*--admin-port"):
            bind(grpc.aio.server(), "127.0.0.1", port, "--admin-port")
