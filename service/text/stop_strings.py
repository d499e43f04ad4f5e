"""End a text before the first stop string in it, however the text is cut into pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Holds back text that may be the start of a stop string.

    The match that is complete first wins; of those that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """The text that is now safe to show; after a match, nothing more."""
        if self.matched:
            return ""
        self._held += text
        matches = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if matches:
            self.matched = True
            safe, self._held = self._held[: min(matches)[1]], ""
            return safe
        cut = len(self._held) - self._held_length()
        safe, self._held = self._held[:cut], self._held[cut:]
        return safe

    def flush(self) -> str:
        """The held text, when no more is coming."""
        held, self._held = self._held, ""
        return held

    def _held_length(self) -> int:
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
