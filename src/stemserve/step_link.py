"""The link for steps between a service and a worker on one machine, as both sides know it.

A Unix stream socket beside that of the worker's RPCs. Either side sends messages, each behind its
length in four little-endian bytes: RunRequest to the worker, RunResponse from it.
"""

import socket
from collections.abc import Iterator

from google.protobuf.message import Message

LENGTH_BYTES = 4
MOST_BYTES = 2**31 - 1  # of a message, as protobuf has it
_SUFFIX = ".steps"


def step_socket(path: str) -> str:
    """The path of the link, from that of the worker's RPCs."""
    return path + _SUFFIX


def framed(message: Message) -> bytes:
    body = message.SerializeToString()
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def received(connection: socket.socket) -> Iterator[bytes]:
    """Messages, until the other side closes. Raises OSError; ConnectionError for half of one."""
    with connection.makefile("rb") as stream:
        while head := stream.read(LENGTH_BYTES):
            length = int.from_bytes(head, "little")
            if length > MOST_BYTES:  # room for it would be made before it comes
                raise ConnectionError(f"no message has {length} bytes")
            body = stream.read(length)
            if len(head) < LENGTH_BYTES or len(body) < length:
                raise ConnectionError("the other side ended in the middle of a message")
            yield body
