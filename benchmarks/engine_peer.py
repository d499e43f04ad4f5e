"""A peer of bench_engine.py in a process of its own: JSON lines to it, JSON lines from it.

Its first line is {"version": ...}, once the engine has started. Then it is asked:
  {"kind": "score", "prefixes": [[id]], "items": [[[id]]], "label_ids": [a, b]}: the items of each
    prefix, all calls at once; the labels' log-probabilities are read.
  {"kind": "decode", "prefix": [id], "own": [[id]], "new_tokens": n}: a request for each of own.
It answers {"seconds": s, "logprobs": [...]}: of the labels by item, or of each first token.
"""

import json
import os
import select
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np

from stemserve.service.bench.measured import rounded
from stemserve.service.bench.peer import Peer, PeerRow
from stemserve.service.bench.rows import DecodeRow, Row, ScoreRow, UnsharedRow
from stemserve.service.bench.tokens import TokenSource

STOP_S = 10.0
ANSWER_S = 120.0


class PeerFailed(Exception):
    """The peer's process ended; the message has the end of what it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions:
    name: str
    python: str  # of an environment with the peer
    path: str  # its PYTHONPATH
    script: Path
    words: tuple[str, ...]  # of the script, beside --model FOLDER
    logs: Path  # folder
    rounds: int  # counted; one more warms up
    start_s: float = 300.0  # how long it may take to start


class EnginePeer:
    def __init__(self, process: "subprocess.Popen[str]", log: Path, options: PeerOptions) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError("the peer's standard input and output are pipes")
        self._requests: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout
        self._log = log
        self._rounds = options.rounds
        self._name = options.name
        self._start_s = options.start_s
        self._failure = ""

    def wait(self) -> None:
        try:
            self._name += f" {self._read(self._start_s)['version']}"
        except (PeerFailed, OSError) as error:
            self._failure = str(error)

    def measure(self, row: Row, tokens: TokenSource) -> PeerRow:
        if self._failure:
            return PeerRow(peer=self._name, peer_ms=None, why=self._failure)
        try:
            if isinstance(row, ScoreRow):
                return self._score(row, tokens)
            if isinstance(row, UnsharedRow):
                return self._unshared(row, tokens)
            return self._decode(row, tokens)
        except (PeerFailed, OSError) as error:
            return PeerRow(peer=self._name, peer_ms=None, why=str(error))

    def _score(self, row: ScoreRow, tokens: TokenSource) -> PeerRow:
        answers: list[dict[str, Any]] = []
        for number in range(1 + self._rounds):
            work = tokens.score_round(row, number)
            answers.append(
                self._ask(
                    kind="score",
                    prefixes=work.prefixes.tolist(),
                    items=work.items.tolist(),
                    label_ids=work.label_ids,
                )
            )
        shape = (row.calls, row.items, 2)
        return self._row([answer["seconds"] for answer in answers[1:]], answers[0], shape)

    def _decode(self, row: DecodeRow, tokens: TokenSource) -> PeerRow:
        """A token takes what 64 take longer than one, over 63; the prefix is stored."""
        seconds: list[float] = []
        answers: list[dict[str, Any]] = []
        for number in range(1 + self._rounds):
            work = tokens.decode_round(row, number)
            asked = {"kind": "decode", "prefix": work.prefix.tolist()}
            # Requests as long as the others, with tokens that are not stored either.
            other = tokens.decode_round(row, 10_000 + number).own.tolist()
            one = self._ask(**asked, own=other, new_tokens=1)
            answers.append(self._ask(**asked, own=work.own.tolist(), new_tokens=row.new_tokens))
            seconds.append((answers[-1]["seconds"] - one["seconds"]) / (row.new_tokens - 1))
        if median(seconds[1:]) <= 0:
            why = f"{row.new_tokens} tokens took no longer than one: the machine is not quiet"
            return PeerRow(peer=self._name, peer_ms=None, why=why)
        return self._row(seconds[1:], answers[0], (row.requests,))

    def _unshared(self, row: UnsharedRow, tokens: TokenSource) -> PeerRow:
        answers = [
            self._ask(
                kind="decode",
                prefix=[],
                own=tokens.unshared_round(row, number).own.tolist(),
                new_tokens=row.new_tokens,
            )
            for number in range(1 + self._rounds)
        ]
        return self._row([a["seconds"] for a in answers[1:]], answers[0], (row.requests,))

    def _row(self, seconds: list[float], first: dict[str, Any], shape: tuple[int, ...]) -> PeerRow:
        return PeerRow(
            peer=self._name,
            peer_ms=rounded(median(seconds) * 1e3),
            rounds_ms=tuple(rounded(value * 1e3) for value in seconds),
            logprobs=np.array(first["logprobs"]).reshape(shape),
        )

    def _ask(self, **request: Any) -> dict[str, Any]:
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return self._read(ANSWER_S)

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """An answer is one line, and none is on its way when this is called."""
        if not select.select([self._answers], [], [], timeout_s)[0]:
            self._failure = f"{self._name} said nothing for {timeout_s:g} s"
            raise PeerFailed(self._failure)
        line = self._answers.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise PeerFailed(f"{self._name} ended: {said[-1][-500:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEngine:
    options: PeerOptions

    @contextmanager
    def __call__(self, model: str, folder: Path) -> Generator[Peer]:
        options = self.options
        log = options.logs / f"{options.name}-{folder.name}.log"
        command = [options.python, str(options.script), "--model", str(folder), *options.words]
        environment = {**os.environ, "PYTHONPATH": options.path}
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
            try:
                yield EnginePeer(process, log, options)
            finally:
                _stop(process)


def _stop(process: "subprocess.Popen[str]") -> None:
    """It ends when it is asked nothing more."""
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
