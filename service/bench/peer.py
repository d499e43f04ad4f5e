"""Another engine that does the rows with the same token ids; benchmarks/ has such engines."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stemserve.service.bench.rows import Row
from stemserve.service.bench.tokens import TokenSource


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerRow:
    peer: str  # name and version
    peer_ms: float | None
    why: str = ""  # there is no peer_ms
    rounds_ms: tuple[float, ...] = ()
    # Of round 0, as MeasuredRow.logprobs; compared with ours before a time counts.
    logprobs: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    compare: bool = True  # False: the peer has other weights


class Peer(Protocol):
    def wait(self) -> None:
        """Until it has started, or failed: nothing is measured beside a start."""
        ...

    def measure(self, row: Row, tokens: TokenSource) -> PeerRow:
        """Raises nothing: a peer that fails says why in its row."""
        ...


class StartPeer(Protocol):
    def __call__(self, model: str, folder: Path) -> AbstractContextManager[Peer]:
        """Returns at once; `wait` then waits until the peer has started."""
        ...
