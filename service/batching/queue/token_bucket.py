"""A rate that a tenant keeps, with room for a burst."""

BURST_S = 2.0  # seconds of the rate that may be used at once


class TokenBucket:
    def __init__(self, rate: float) -> None:
        """`rate` a second; 0: no limit."""
        self._rate = rate
        self._level = self._size = rate * BURST_S
        self._at = float("-inf")

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; 0: now. More than a burst waits for a full bucket,
        or it could never pass."""
        if not self._rate:
            return 0.0
        self._fill(now)
        return max(0.0, (min(amount, self._size) - self._level) / self._rate)

    def take(self, amount: float, now: float) -> None:
        """The level may fall below 0: what is above a burst is paid for afterwards."""
        if self._rate:
            self._fill(now)
            self._level -= amount

    def _fill(self, now: float) -> None:
        if now > self._at:
            gained = (now - self._at) * self._rate
            self._level = min(self._size, self._level + gained)
            self._at = now
