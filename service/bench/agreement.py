"""Whether a peer has the same log-probabilities as ours, before its times count."""

from dataclasses import dataclass

import numpy as np

from stemserve.service.bench.measured import MeasuredRow, rounded
from stemserve.service.bench.peer import PeerRow
from stemserve.service.bench.rows import ScoreRow

# bf16 engines round differently: with random weights the log-probabilities of a row spread by
# about 1, and two right engines differ by some hundredths.
MOST_DIFFERENCE = 0.15  # of a log-probability, the mean over a row
LEAST_CORRELATION = 0.95  # over the items of a Score row


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    mean_difference: float
    largest_difference: float
    correlation: float | None

    @property
    def refusal(self) -> str:
        """Empty where the two agree."""
        if not self.mean_difference <= MOST_DIFFERENCE:
            return f"log-probabilities differ from ours by {self.mean_difference:.3g} in the mean"
        if self.correlation is not None and not self.correlation >= LEAST_CORRELATION:
            return f"log-probabilities correlate with ours by {self.correlation:.3g} only"
        return ""


def compare(ours: MeasuredRow, peer: PeerRow) -> Agreement:
    """Raises ValueError where the two have not read out the same things."""
    if ours.logprobs.shape != peer.logprobs.shape or not ours.logprobs.size:
        raise ValueError(f"shapes {ours.logprobs.shape} and {peer.logprobs.shape}")
    difference = np.abs(ours.logprobs - peer.logprobs)
    correlation = None
    if isinstance(ours.row, ScoreRow):
        pair = np.corrcoef(ours.logprobs.ravel(), peer.logprobs.ravel())
        correlation = rounded(float(pair[0, 1]))
    return Agreement(
        mean_difference=rounded(float(difference.mean())),
        largest_difference=rounded(float(difference.max())),
        correlation=correlation,
    )
