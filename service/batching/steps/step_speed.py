"""How long the worker takes for work, learnt from its steps."""

FORGETTING = 0.95  # weight of what was known before, at each step
MIN_STEPS = 4  # before an estimate is given


class StepSpeed:
    """Seconds of a step as `start + rows * each`, by least squares that forget."""

    def __init__(self, *, max_step_tokens: int) -> None:
        self._max_step_tokens = max_step_tokens
        self._steps = 0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        if seconds <= 0 or rows < 1:
            return
        self._steps += 1
        self._n = FORGETTING * self._n + 1.0
        self._x = FORGETTING * self._x + rows
        self._y = FORGETTING * self._y + seconds
        self._xx = FORGETTING * self._xx + rows * rows
        self._xy = FORGETTING * self._xy + rows * seconds

    def seconds(self, tokens: int) -> float | None:
        """Of steps that compute so many tokens; None before enough is known."""
        if self._steps < MIN_STEPS:
            return None
        start, each = self._line()
        return -(-tokens // self._max_step_tokens) * start + tokens * each

    def _line(self) -> tuple[float, float]:
        """Neither is negative; steps of one size only say how long such a step takes."""
        spread = self._n * self._xx - self._x * self._x
        if spread > 1e-9 * self._n * self._xx:
            each = (self._n * self._xy - self._x * self._y) / spread
            start = (self._y - each * self._x) / self._n
            if each >= 0 and start >= 0:
                return start, each
            if each < 0:
                return self._y / self._n, 0.0
        return 0.0, self._y / self._x
