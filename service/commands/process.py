"""The command line as a process: its arguments as text, and what ends it beside its commands."""

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from stemserve.service.commands.app import app
from stemserve.service.commands.failure import say

CANNOT_WRITE = 1
WRONG_USAGE = 2
OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def run() -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal's encoding lacks is no error
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = as_text(sys.argv[1:])
    except ValueError as error:
        say(str(error))
        sys.exit(WRONG_USAGE)
    try:
        try:
            app(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        _end(error)
    sys.exit()


def as_text(arguments: Sequence[str]) -> list[str]:
    """UTF-8, also where the locale says otherwise. Raises ValueError for what is not."""
    texts: list[str] = []
    for at, argument in enumerate(arguments):
        try:
            texts.append(_decoded(argument))
        except UnicodeError as error:
            option, before = argument.partition("=")[0], arguments[at - 1] if at else ""
            name = next((word for word in (option, before) if word.startswith("--")), None)
            raise ValueError(f"{name or f'argument {at + 1}'} is not UTF-8 text") from error
    return texts


def _decoded(argument: str) -> str:
    """Python has surrogates where it could not decode a byte."""
    if any("\ud800" <= letter <= "\udfff" for letter in argument):
        return os.fsencode(argument).decode("utf-8")
    return argument


def _end(error: OSError) -> NoReturn:
    """Mostly nobody reads on, as behind `head`, or the disk is full."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
    if error.errno in OF_OUTPUT and error.filename is None:
        say(f"cannot write to standard output: {error.strerror}")
    elif error.errno != errno.EPIPE:
        say(str(error))
    sys.exit(CANNOT_WRITE)
