"""The commands about tries: sets of sequences that outputs are held to."""

import json
import time
from collections.abc import Awaitable, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from stemserve.proto.v1 import tries_pb2, tries_pb2_grpc
from stemserve.service.client.answers import pages_of
from stemserve.service.client.tries import upload_messages
from stemserve.service.commands.call import (
    SERVER,
    TIMEOUT_S,
    AsJson,
    Channel,
    Server,
    Timeout,
    call,
)
from stemserve.service.commands.options import read_text
from stemserve.service.commands.plain_json import print_json
from stemserve.service.packed_tokens import PackedTokens, pack

PAGE = 1000
LARGEST_ID = (1 << 31) - 1

app = typer.Typer(
    help="Upload, look up and delete sets of sequences that outputs are held to.",
    no_args_is_help=True,
)

TrieId = Annotated[str, typer.Argument(help="As the upload answered it, or as you chose it.")]


@app.command()
def upload(
    file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="A sequence a line, with the space before it that the prompt lacks; - reads "
            "standard input.",
        ),
    ],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="The lines are JSON lists of token ids.")
    ] = False,
    trie_id: Annotated[
        str, typer.Option(metavar="ID", help="Id to give it; else the server makes one.")
    ] = "",
    ttl_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Lifetime without use; 0: the server's.")
    ] = 0.0,
    server: Server = SERVER,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Give a set of sequences an id. `stemserve generate --trie ID` then writes one of them.

    \b
    Example:
      stemserve tries upload --file titles.txt --trie-id titles
    """
    lines = [line for line in read_text("--file", file).split("\n") if line.strip()]
    if not lines:
        raise typer.BadParameter(f"--file {file} holds no sequences")
    sequences = _token_lines(lines) if tokens else lines

    async def run(channel: Channel) -> tries_pb2.UploadTrieResponse:
        messages = upload_messages(sequences, trie_id=trie_id, ttl_seconds=ttl_seconds)
        stub: Any = tries_pb2_grpc.TriesStub(channel)
        response: tries_pb2.UploadTrieResponse = await stub.UploadTrie(messages, timeout=timeout)
        return response

    response = call(server, run)
    _print(response, [response.trie], as_json)


@app.command()
def get(
    trie_id: TrieId,
    server: Server = SERVER,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show one trie: its sequences, the memory that it takes, and until when it lives."""
    request = tries_pb2.GetTrieRequest(trie_id=trie_id)

    async def run(channel: Channel) -> tries_pb2.GetTrieResponse:
        return await tries_pb2_grpc.TriesStub(channel).GetTrie(request, timeout=timeout)

    response = call(server, run)
    _print(response, [response.trie], as_json)


@app.command(name="list")
def list_all(
    server: Server = SERVER, timeout: Timeout = TIMEOUT_S, as_json: AsJson = False
) -> None:
    """Show all tries."""

    async def run(channel: Channel) -> tries_pb2.ListTriesResponse:
        stub = tries_pb2_grpc.TriesStub(channel)

        def read(token: str) -> Awaitable[tries_pb2.ListTriesResponse]:
            request = tries_pb2.ListTriesRequest(page_size=PAGE, page_token=token)
            return stub.ListTries(request, timeout=timeout)

        return tries_pb2.ListTriesResponse(
            tries=[one async for page in pages_of(read) for one in page.tries]
        )

    response = call(server, run)
    _print(response, response.tries, as_json)


@app.command()
def delete(
    trie_id: TrieId,
    server: Server = SERVER,
    timeout: Timeout = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Delete a trie; calls that run go on with it."""
    request = tries_pb2.DeleteTrieRequest(trie_id=trie_id)

    async def run(channel: Channel) -> tries_pb2.DeleteTrieResponse:
        return await tries_pb2_grpc.TriesStub(channel).DeleteTrie(request, timeout=timeout)

    response = call(server, run)
    if as_json:
        _print(response, [], as_json)
    else:
        print(f"deleted {trie_id}")


def _token_lines(lines: Sequence[str]) -> PackedTokens:
    sequences: list[list[int]] = []
    for number, line in enumerate(lines, start=1):
        try:
            ids: list[int] = json.loads(line)
            if not all(type(token) is int and 0 <= token <= LARGEST_ID for token in ids):
                raise ValueError
        except (TypeError, ValueError) as error:
            raise typer.BadParameter(
                f"--file: line {number} is not a JSON list of token ids"
            ) from error
        sequences.append(ids)
    return pack([np.array(ids, np.int32) for ids in sequences])


def _print(response: Message, tries: Sequence[tries_pb2.Trie], json_wanted: bool) -> None:
    if json_wanted:
        print_json(response)
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("trie id", overflow="fold")
    for name in ("sequences", "nodes", "bytes", "expires in"):
        table.add_column(name, justify="right")
    for trie in tries:
        left_s = trie.expires_unix_seconds - time.time()
        table.add_row(
            trie.trie_id,
            str(trie.sequences),
            str(trie.nodes),
            str(trie.bytes),
            f"{left_s:.0f} s",
        )
    Console().print(table)
