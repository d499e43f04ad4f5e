"""How the command line reads items, and what it says about a file or a server that is wrong."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import typer

from stemserve.service.client import Access, ClientError
from stemserve.service.commands.call import call
from stemserve.service.commands.failure import fail_call
from stemserve.service.commands.options import read_items, whole_int32, whole_uint32
from stemserve.service.commands.process import as_text


@pytest.mark.parametrize(
    ("content", "items"),
    [
        (b"one\n two \n", ("one", " two ")),
        (b"one\r\n\r\ntwo", ("one", "two")),
        (b"\xef\xbb\xbfone\n   \n\ntwo\n", ("one", "two")),
        ("a\x0cb\u2028c\x85d\n".encode(), ("a\x0cb\u2028c\x85d",)),
    ],
)
def test_an_item_is_a_line_that_is_not_blank(
    tmp_path: Path, content: bytes, items: tuple[str, ...]
) -> None:
    file = tmp_path / "items.txt"
    file.write_bytes(content)
    assert read_items(str(file), None) == items
    assert read_items(str(file), ["more"]) == (*items, "more")


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "holds no items"), (b" \r\n\n", "holds no items"), (b"\xff\xfe\n", "not UTF-8")],
)
def test_a_file_without_items_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "items.txt"
    file.write_bytes(content)
    with pytest.raises(typer.BadParameter, match=problem) as refused:
        read_items(str(file), None)
    assert str(file) in refused.value.message


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "utf-16"])
def test_standard_input_is_read_as_a_file_whatever_the_locale(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def give(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding))

    give("é\r\n 日本\n".encode())
    assert read_items("-", None) == ("é", " 日本")
    give(b"a\xff")
    with pytest.raises(typer.BadParameter, match="cannot read --items -: it is not UTF-8 text"):
        read_items("-", None)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(typer.BadParameter, match="standard input is closed"):
        read_items("-", None)


def test_arguments_are_utf8_whatever_the_locale() -> None:
    as_c_has_it = "é".encode().decode("ascii", "surrogateescape")
    assert as_text(["--item", as_c_has_it, "--item=b", "日"]) == ["--item", "é", "--item=b", "日"]
    for wrong in (["score", "--item", "a\udcff"], ["--item=\udcff"], ["x", "--item", "\ud800"]):
        with pytest.raises(ValueError, match="^--item is not UTF-8 text"):
            as_text(wrong)
    with pytest.raises(ValueError, match="^argument 2 is not UTF-8 text"):
        as_text(["get", "\udcff"])


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="No such file"):
        read_items(str(tmp_path / "none"), None)
    with pytest.raises(typer.BadParameter, match="directory"):
        read_items(str(tmp_path), None)


def test_a_server_without_a_port_is_refused_before_any_call() -> None:
    async def work(channel: grpc.aio.Channel) -> None:
        raise AssertionError(channel)

    with pytest.raises(typer.BadParameter, match="'localhost' has no port"):
        call("localhost", work)
    with pytest.raises(typer.BadParameter, match=r"has a scheme; give HOST:PORT.* --tls before"):
        call("https://localhost:50051", work)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!"),
        (grpc.StatusCode.UNAVAILABLE, "failed: Failed parsing HTTP/2 (Expected SETTINGS frame)"),
    ],
)
def test_a_port_that_does_not_serve_calls_is_explained(
    code: grpc.StatusCode, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        fail_call(ClientError(code, message), "host:1")
    assert "not the gRPC port" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("failed to connect; last error: UNAVAILABLE: ipv4:1: Socket closed", "with TLS needs"),
        ("last error: UNKNOWN: Tls handshake failed (TSI_PROTOCOL_FAILURE)", "--ca names who"),
    ],
)
def test_a_connection_that_fails_is_explained(
    message: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        fail_call(ClientError(grpc.StatusCode.UNAVAILABLE, message), "host:1")
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize(("parse", "number"), [(whole_int32, 1 << 31), (whole_uint32, -1)])
def test_a_number_that_its_field_cannot_hold_is_refused(
    parse: Callable[[str], int], number: int
) -> None:
    assert parse("7") == 7
    with pytest.raises(typer.BadParameter, match="is not in"):
        parse(str(number))
    with pytest.raises(typer.BadParameter, match="whole number"):
        parse("1.5")


@pytest.mark.parametrize("key", ["one\n", "two\nlines", "caf\u00e9"])
def test_a_key_that_no_header_may_carry_is_refused_before_any_call(key: str) -> None:
    with pytest.raises(ValueError, match="the key has"):
        Access(key=key)
