"""Run the rows that were chosen: start a server a model, measure, and write after each row."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from stemserve.service.bench.client_pool import ClientFailed, ClientPool
from stemserve.service.bench.decode_bench import measure_decode
from stemserve.service.bench.measured import MeasuredRow
from stemserve.service.bench.models import SHAPES
from stemserve.service.bench.open_loop import OpenLoop, measure_open_loop
from stemserve.service.bench.peer import Peer, PeerRow, StartPeer
from stemserve.service.bench.result import Entry, Result
from stemserve.service.bench.rows import Row, ScoreRow, UnsharedRow
from stemserve.service.bench.score_bench import measure_score
from stemserve.service.bench.server_process import START_S, ServerFailed, running_server
from stemserve.service.bench.target import FULL, Repeats, Target, describe
from stemserve.service.bench.tokens import TokenSource
from stemserve.service.bench.unshared_bench import measure_unshared
from stemserve.service.client.errors import ClientError

NO_PEER = PeerRow(peer="none", peer_ms=None, why="no peer: bench_engine.py --peer runs one")


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
    # Servers of all models and their peers run at once: the options must leave them memory.
    together: bool = False
    start_s: float = START_S  # of a server
    fallback_words: Sequence[str] = ()  # with them a server that did not start is tried again
    hold: Path | None = None  # once everything has started, wait until there is such a file
    seconds: float = float("inf")  # from the first row's start; no row starts later

    @property
    def server_words(self) -> list[str]:
        """Of `stemserve serve`, beside its model."""
        words = [*self.serve_options]
        if self.random_weights:
            words += ["--load-format", "dummy"]
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
        self._began = 0.0  # of the first row, time.monotonic

    def run(self) -> None:
        """Raises ServerFailed, ClientFailed or ClientError where nothing runs together."""
        plan = self._plan
        with ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folders = {model: self._folder(model, work) for model in plan.models}
            peers = self._launch_peers(stack, folders)
            log = plan.log or work / "server.log"
            targets: dict[str, Target | str] = {}
            if plan.together:
                targets = {
                    model: self._try_start(stack, folder, log.with_stem(f"{log.stem}-{model}"))
                    for model, folder in folders.items()
                }
            self._wait(peers)
            self._began = time.monotonic()
            for model, folder in folders.items():
                with ExitStack() as of_model:
                    target = targets.get(model) or self._start(of_model, folder, log)
                    self._measure(target, model, peers.get(model))

    def _launch_peers(self, stack: ExitStack, folders: Mapping[str, Path]) -> dict[str, Peer]:
        if self._start_peer is None:
            return {}
        models = dict.fromkeys(row.model for row in self._plan.rows)
        return {m: stack.enter_context(self._start_peer(m, folders[m])) for m in models}

    def _wait(self, peers: Mapping[str, Peer]) -> None:
        for model, peer in peers.items():
            self._doing(f"{model}: waiting for the peer")
            peer.wait()
        hold = self._plan.hold
        while hold is not None and not hold.exists():
            self._doing(f"everything runs; waiting for {hold}")
            time.sleep(0.2)

    def _measure(self, target: Target | str, model: str, peer: Peer | None) -> None:
        """`target`: or why there is none."""
        plan = self._plan
        for row in plan.rows:
            if row.model != model:
                continue
            if self._is_late(row.name):
                continue
            self._doing(row.name)
            ours = failed(row, target) if isinstance(target, str) else measure(target, row)
            theirs = self._peer_row(row, target, peer)
            self._done(self._result.add_row(ours, theirs))
            self._result.write(plan.output)
        if plan.open_loop is not None and plan.open_loop.model == model:
            self._measure_open_loop(target, plan.open_loop)

    def _peer_row(self, row: Row, target: Target | str, peer: Peer | None) -> PeerRow:
        if peer is None:
            return NO_PEER
        if isinstance(target, str):
            return replace(NO_PEER, why="there are no times of ours")
        self._doing(f"{row.name}, peer")
        return peer.measure(row, target.tokens)

    def _measure_open_loop(self, target: Target | str, loop: OpenLoop) -> None:
        if not isinstance(target, str) and not self._is_late(loop.name):
            self._result.add_open_loop(loop, measure_open_loop(target, loop, self._doing))
            self._result.write(self._plan.output)

    def _is_late(self, name: str) -> bool:
        late = time.monotonic() - self._began > self._plan.seconds
        if late:
            self._result.left_out.append(name)
        return late

    def _folder(self, model: str, work: Path) -> Path:
        """Of the model that is served; a server that runs has its own."""
        if self._plan.server is not None:
            return work
        shape, folders = SHAPES[model], self._plan.folders
        return shape.write(work) if folders is None else folders / shape.name

    def _try_start(self, stack: ExitStack, folder: Path, log: Path) -> Target | str:
        """One server that does not start leaves the others."""
        why = ""
        for more in ((), self._plan.fallback_words):
            if why and not more:
                break
            try:
                return self._start(stack, folder, log, more)
            except (ServerFailed, ClientFailed, ClientError) as error:
                why = str(error)
                self._result.notes.append(f"{folder.name} {' '.join(more)}: {why}")
        return why

    def _start(self, stack: ExitStack, folder: Path, log: Path, more: Sequence[str] = ()) -> Target:
        server = self._plan.server
        if server is None:
            self._doing(f"{folder.name}: starting the server")
            options = ["--model", str(folder), *self._plan.server_words, *more]
            started = stack.enter_context(
                running_server(options, log=log, start_s=self._plan.start_s)
            )
            server = Running(address=started.address, metrics_url=started.metrics_url)
        vocab = describe(server.address).vocab_size
        return Target(
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
        if isinstance(row, UnsharedRow):
            return measure_unshared(target, row)
        return measure_decode(target, row)
    except ClientError as error:
        return failed(row, str(error))


def failed(row: Row, why: str) -> MeasuredRow:
    return MeasuredRow(
        row=row, ours_ms=None, rounds_ms=(), failures=1, first_failure=why, times=None
    )
