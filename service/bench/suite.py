"""Run the rows that were chosen: start a server a model, measure, and write after each row."""

import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from stemserve.service.bench.client_pool import ClientPool
from stemserve.service.bench.decode_bench import measure_decode
from stemserve.service.bench.facts import gpu_name
from stemserve.service.bench.measured import MeasuredRow
from stemserve.service.bench.models import SHAPES
from stemserve.service.bench.open_loop import OpenLoop, measure_open_loop
from stemserve.service.bench.peer import Peer, PeerRow, StartPeer
from stemserve.service.bench.result import Entry, Result
from stemserve.service.bench.rows import Row, ScoreRow
from stemserve.service.bench.score_bench import measure_score
from stemserve.service.bench.server_process import running_server
from stemserve.service.bench.target import FULL, Repeats, Target, describe
from stemserve.service.bench.tokens import TokenSource
from stemserve.service.client_errors import ClientError

STEP_TOKENS = "--max-step-tokens"
GPU_STEP_TOKENS = 16_384  # rows of a step: a server's default is for a CPU
NO_PEER = PeerRow(peer="none", peer_ms=None, why="no peer was asked for (--peer)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that somebody else runs."""

    address: str
    metrics_url: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    rows: Sequence[Row]
    open_loop: OpenLoop | None
    output: Path
    seed: int
    clients: int  # processes that call
    repeats: Repeats = FULL
    server: Running | None = None  # else one is started for each model
    serve_options: Sequence[str] = ()  # of `stemserve serve`
    folders: Path | None = None  # of the models; else one with a config.json is made for each
    random_weights: bool = True
    log: Path | None = None  # of the servers; else it goes with the run

    @property
    def server_words(self) -> list[str]:
        """Of `stemserve serve`, beside its model."""
        words = [*self.serve_options]
        if self.random_weights:
            words += ["--load-format", "dummy"]
        if gpu_name() is not None and STEP_TOKENS not in words:
            words += [STEP_TOKENS, str(GPU_STEP_TOKENS)]
        return words

    @property
    def models(self) -> tuple[str, ...]:
        loop = [self.open_loop.model] if self.open_loop else []
        return tuple(dict.fromkeys([*(row.model for row in self.rows), *loop]))


Say = Callable[[str], None]


class Suite:
    def __init__(
        self,
        plan: SuitePlan,
        result: Result,
        *,
        doing: Say,
        done: Callable[[Entry], None],
        start_peer: StartPeer | None = None,
    ) -> None:
        """`doing` is told what comes next, `done` of each row that is measured."""
        self._plan = plan
        self._result = result
        self._doing = doing
        self._done = done
        self._start_peer = start_peer

    def run(self) -> None:
        """Raises ServerFailed, ClientFailed or ClientError."""
        with ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folders = {model: self._folder(model, work) for model in self._plan.models}
            peers: dict[str, Peer] = {}
            if self._start_peer is not None:
                for model in dict.fromkeys(row.model for row in self._plan.rows):
                    started = self._start_peer(model, folders[model])
                    peers[model] = stack.enter_context(started)
            self._wait(peers)
            for model, folder in folders.items():
                with self._target(folder, self._plan.log or work / "server.log") as target:
                    self._measure(target, model, peers.get(model))

    def _wait(self, peers: Mapping[str, Peer]) -> None:
        for model, peer in peers.items():
            self._doing(f"{model}: waiting for the peer")
            peer.wait()

    def _measure(self, target: Target, model: str, peer: Peer | None) -> None:
        for row in self._plan.rows:
            if row.model != model:
                continue
            self._doing(row.name)
            ours = measure(target, row)
            self._doing(f"{row.name}, peer" if peer else row.name)
            theirs = peer.measure(row, target.tokens) if peer else NO_PEER
            self._done(self._result.add_row(ours, theirs))
            self._result.write(self._plan.output)
        loop = self._plan.open_loop
        if loop is not None and loop.model == model:
            self._result.add_open_loop(loop, measure_open_loop(target, loop, self._doing))
            self._result.write(self._plan.output)

    def _folder(self, model: str, work: Path) -> Path:
        """Of the model that is served; a server that runs has its own."""
        if self._plan.server is not None:
            return work
        shape, folders = SHAPES[model], self._plan.folders
        return shape.write(work) if folders is None else folders / shape.name

    @contextmanager
    def _target(self, folder: Path, log: Path) -> Generator[Target]:
        with ExitStack() as stack:
            server = self._plan.server
            if server is None:
                self._doing(f"{folder.name}: starting the server")
                options = ["--model", str(folder), *self._plan.server_words]
                started = stack.enter_context(running_server(options, log=log))
                server = Running(address=started.address, metrics_url=started.metrics_url)
            vocab = describe(server.address).vocab_size
            yield Target(
                address=server.address,
                metrics_url=server.metrics_url,
                pool=stack.enter_context(ClientPool(server.address, self._plan.clients)),
                tokens=TokenSource(vocab=vocab, seed=self._plan.seed),
                repeats=self._plan.repeats,
            )


def measure(target: Target, row: Row) -> MeasuredRow:
    """A row that the server refuses, as one that is longer than its context, is a failure."""
    try:
        if isinstance(row, ScoreRow):
            return measure_score(target, row)
        return measure_decode(target, row)
    except ClientError as error:
        return MeasuredRow(
            row=row, ours_ms=None, rounds_ms=(), failures=1, first_failure=str(error), times=None
        )
