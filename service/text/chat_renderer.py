"""Run a model's chat template in a process of its own."""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from stemserve.service.errors import InvalidRequest
from stemserve.service.text.chat_template import ChatTemplate

COMMAND = (sys.executable, "-m", "stemserve.service.text.chat_process")
FIELD = "chat"


class ChatRenderer:
    """The process starts with the first chat, and again after one that had to be killed.

    Its input ends with the service, however that ends, and then so does the process.
    """

    def __init__(
        self, template: ChatTemplate, *, max_characters: int, max_milliseconds: int
    ) -> None:
        self._template = template
        self._start_line = {
            "templates": dict(template.sources),
            "max_characters": max_characters,
            "seconds": max_milliseconds / 1000,
        }
        self._max_milliseconds = max_milliseconds
        self._turn = threading.Lock()
        self._process: _Process | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises InvalidRequest with the template's own words where it refuses the messages."""
        asked = {
            "template": self._template.name(with_tools=variables.get("tools") is not None),
            "variables": {**self._template.tokens, **variables},
        }
        with self._turn:
            if self._process is None:
                self._process = self._started()
            answer = self._process.ask(asked)
            if answer is None:
                code, self._process = self._process.end(), None
                raise InvalidRequest(FIELD, self._death(code))
        if "error" in answer:
            raise InvalidRequest(FIELD, f"the model's chat template refuses it: {answer['error']}")
        return answer["text"]

    def _started(self) -> "_Process":
        process = _Process()
        answer = process.ask(self._start_line)
        if answer == {}:
            return process
        code = process.end()
        if answer is None:
            raise InvalidRequest(FIELD, self._death(code))
        problem = answer["error"]
        raise InvalidRequest(FIELD, f"the model's chat template cannot be used: {problem}")

    def _death(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return (
                "the model's chat template took longer than max_chat_render_ms "
                f"({self._max_milliseconds})"
            )
        return f"the model's chat template ended its process with code {code}"


class _Process:
    def __init__(self) -> None:
        # In a session of its own, as the worker is: Ctrl-C reaches the service only.
        self._child = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="ascii",
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _end, self._child)

    def ask(self, asked: Mapping[str, Any]) -> dict[str, str] | None:
        """None where the process ended."""
        stdin, stdout = self._child.stdin, self._child.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the process was started without pipes")
        try:
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
        except BrokenPipeError:
            return None
        line = stdout.readline()
        answer: dict[str, str] | None = json.loads(line) if line.endswith("\n") else None
        return answer

    def end(self) -> int:
        """The exit code; that of a process which ended by itself is its own."""
        code: int | None = self._end()
        if code is None:
            raise RuntimeError("the process was ended twice")
        return code


def _end(child: "subprocess.Popen[str]") -> int:
    if child.stdin is not None:
        with suppress(BrokenPipeError):  # what was not written has no reader
            child.stdin.close()
    try:
        code = child.wait(0.2)  # it ends by itself, with its input at the latest
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if child.stdout is not None:
        child.stdout.close()
    return code
