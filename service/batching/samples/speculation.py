"""Whether the next decode step verifies drafts of the tokens behind its own.

Such a step has more rows, and its samples wait for its result: how far they have come is known only
then. So it pays where drafts come true, and where rows cost little beside the step; both are
measured. What drafts would bring is known without trying (`Drafter`); what their steps take is
learned from those that ran.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from statistics import median

from stemserve.service.batching.jobs.decoding_progress import DecodingProgress
from stemserve.service.batching.steps.step_builder import IssuedStep

RECENT_STEPS = 5  # whose median counts
FIRST_COST = 1.5  # of a step with drafts, in plain ones, until some have run
FEWEST_STEPS = 3  # the first of a kind may be far slower than others
# Plain steps, times what one with drafts costs: then the oldest such cost is forgotten.
FORGET_AFTER = 32
MOST_COST = 32.0  # that counts there
REST = 16  # plain steps after drafts have ended: to begin, and to end, costs a wait each
HOLD = 0.1  # of the gain that may be lost before drafts end
MOST_DELAY = 1.05  # of a step, for samples beside that have no drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPolicy:
    default_tokens: int = 0  # of a draft, where a job does not say
    least_gain: float = 1.2  # expected, in tokens a second, for drafts to begin


class Stage(Enum):
    PLAIN = auto()  # no drafts: the next rows go out before the tokens of the last are known
    WAIT = auto()  # no decode rows until all that is in flight is answered
    VERIFY = auto()


class StepTimes:
    """Seconds by rows; more rows than those of a known time take as much more."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=RECENT_STEPS)

    def add(self, rows: int, seconds: float) -> None:
        self._recent.append((rows, seconds))

    def forget(self) -> None:
        """The oldest."""
        if self._recent:
            self._recent.popleft()

    def seconds(self, rows: int, *, fewest: int = 1) -> float | None:
        """None: fewer times than that are known."""
        if len(self._recent) < fewest:
            return None
        return median(known * max(1.0, rows / of_rows) for of_rows, known in self._recent)


class Speculation:
    def __init__(self, policy: DraftPolicy) -> None:
        self._least_gain = policy.least_gain
        self._is_on = False
        self._plain = StepTimes()
        self._more = StepTimes()  # that steps with so many drafted tokens take
        self._plain_steps = 0  # since something was forgotten
        self._cost = 1.0  # of a step with drafts, in plain ones, as far as it is known
        self._rest = 0  # plain steps that are to run before drafts may begin
        self._answered_s = 0.0
        self._answered_jobs: set[int] = set()
        self.steps = 0  # that verified drafts

    def stage(self, decoding: Sequence[DecodingProgress], *, nobody_waits: bool) -> Stage:
        """Of the jobs that decode. While others wait, steps are full of other rows."""
        drafts = [job.draft_tokens for job in decoding] if nobody_waits else []
        was_on = self._is_on
        self._is_on = sum(drafts) > 0 and not self._rest and self._pays(decoding, drafts)
        if not self._is_on:
            if was_on and sum(drafts) > 0:
                self._rest = REST
            return Stage.PLAIN
        return Stage.WAIT if any(job.in_flight for job in decoding) else Stage.VERIFY

    def learn(self, issued: IssuedStep, seconds: float, now: float) -> None:
        """An answered step took so long in the worker."""
        gap = now - self._answered_s
        goes_on = not self._answered_jobs.isdisjoint(issued.shares)
        self._answered_s, self._answered_jobs = now, set(issued.shares)
        if issued.draft_tokens:
            self.steps += 1
            plain = self._plain.seconds(issued.num_rows - issued.draft_tokens)
            if issued.num_rows == issued.decode_rows and plain is not None:
                # Nothing runs beside it: what the host takes counts too.
                taken = max(seconds, gap) if goes_on else seconds
                self._more.add(issued.draft_tokens, max(0.0, taken - plain))
        elif issued.num_rows == issued.decode_rows:
            # The worker may count from before the end of the step before.
            taken = max(seconds / 2, min(seconds, gap)) if gap > 0 else seconds
            if taken > 0:
                self._plain.add(issued.num_rows, taken / issued.repeat)
            if not self._is_on:
                self._count_plain(issued.repeat)

    def _count_plain(self, steps: int) -> None:
        self._rest = max(0, self._rest - steps)
        self._plain_steps += steps
        if self._plain_steps >= FORGET_AFTER * min(self._cost, MOST_COST):
            self._plain_steps = 0
            self._more.forget()

    def _pays(self, decoding: Sequence[DecodingProgress], drafts: Sequence[int]) -> bool:
        rows = sum(job.num_live for job in decoding)
        plain = self._plain.seconds(rows)
        if plain is None:
            return False
        more = self._more.seconds(sum(drafts), fewest=FEWEST_STEPS)
        cost = FIRST_COST if more is None else 1 + more / plain
        self._cost = cost
        if 0 in drafts and cost > MOST_DELAY:
            return False
        gain = (1 + sum(job.expected_tokens for job in decoding) / rows) / cost
        return gain >= self._least_gain - HOLD * self._is_on
