"""Guesses of a sample's next tokens, from what its prompt and its output repeat.

No index is kept: the places where the last token came before are found in one pass over the tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stemserve.service.request import Int32

SHORTEST_MATCH = 2  # tokens; fewer are found everywhere
LONGEST_MATCH = 8  # longer ones are not told apart
MOST_PLACES = 64  # the latest ones, whose matches are compared
BACK = np.arange(LONGEST_MATCH)
NEWEST_WEIGHT = 0.25  # of the newest draft in the average
MOST_IDLE = 3  # tokens for which nothing is looked up, while nothing is found


class TokenHistory:
    """The tokens of a prompt and of what followed it."""

    def __init__(self, prompt: Int32, room: int) -> None:
        start = LONGEST_MATCH  # what is before the first token matches nothing
        self._tokens: Int32 = np.full(start + len(prompt) + room, -1, np.int32)
        self._tokens[start : start + len(prompt)] = prompt
        self._count = start + len(prompt)

    def add(self, token: int) -> None:
        self._tokens[self._count] = token
        self._count += 1

    def draft(self, most: int) -> list[int]:
        """What followed where the longest part of the end came before; the latest such place. Less
        than a period from the end, the period goes on."""
        tokens, last = self._tokens[: self._count], self._count - 1
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        for back in range(1, SHORTEST_MATCH):
            ends = ends[tokens[ends - back] == tokens[last - back]]
        if not len(ends):
            return []
        start = self._longest(ends[-MOST_PLACES:]) + 1
        period = self._count - start
        draft: list[int] = tokens[start : start + most].tolist()
        while len(draft) < most:
            draft.append(draft[-period])
        return draft

    def _longest(self, ends: NDArray[np.intp]) -> int:
        """Of places where a match ends, ascending, that of the longest; the latest of them."""
        if len(ends) == 1:
            return int(ends[0])
        same = self._tokens[ends[:, None] - BACK] == self._tokens[self._count - 1 - BACK]
        lengths = same.cumprod(1).sum(1)
        return int(ends[len(ends) - 1 - lengths[::-1].argmax()])


class Drafter:
    """Drafts of one sample, each held against what came, whether a step verified it or not: so it
    is known what drafts would bring before any step is spent on one."""

    def __init__(self, prompt: Int32, *, max_new_tokens: int, most: int) -> None:
        self.most = most  # tokens of a draft
        self.expected = 0.0  # tokens of a draft that come, in the average of late
        self._prompt = prompt
        self._max_new_tokens = max_new_tokens
        self._history: TokenHistory | None = None  # until there is a first token
        self._draft: list[int] = []
        self._right = 0  # of its first tokens that came
        self._idle = 0  # tokens until the next look
        self._misses = 0  # drafts in a row of which nothing came

    def add(self, tokens: Sequence[int]) -> None:
        """They came."""
        if self._history is None:
            self._history = TokenHistory(self._prompt, self._max_new_tokens)
        for token in tokens:
            self._history.add(token)
            if self._right < len(self._draft) and self._draft[self._right] == token:
                self._right += 1
            elif self._idle:
                self._idle -= 1
                self._look(self._history)
            else:
                self._close(self._history)

    def draft(self) -> list[int]:
        """Of the very next tokens; may be empty."""
        if self._history is not None and 0 < len(self._draft) == self._right:
            self._close(self._history)
        return self._draft[self._right :]

    def _close(self, history: TokenHistory) -> None:
        """A step that verified the draft would have ended here; make the next."""
        self.expected += NEWEST_WEIGHT * (self._right - self.expected)
        self._misses = 0 if self._right else self._misses + 1
        self._idle = min(self._misses // 4, MOST_IDLE)
        self._look(history)

    def _look(self, history: TokenHistory) -> None:
        self._draft = [] if self._idle else history.draft(self.most)
        self._right = 0
