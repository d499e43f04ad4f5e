"""Make tries of what clients send, within a time limit."""

import time
from collections.abc import Set

import numpy as np

from stemserve.service.constraints.token_trie import TokenTrie, build_trie
from stemserve.service.errors import InvalidRequest
from stemserve.service.packed_tokens import PackedTokens


class TrieBuilder:
    def __init__(self, eos_ids: Set[int], *, vocab_size: int, longest: int, max_ms: int) -> None:
        """`longest`: tokens that the model's context has room for; `max_ms`: of one trie."""
        self._end_ids = np.array(sorted(eos_ids), np.int32)
        self._end_ids = self._end_ids[self._end_ids < vocab_size]
        self._vocab_size = vocab_size
        self._longest = longest
        self._max_ms = max_ms

    def build(self, field: str, sequences: PackedTokens) -> TokenTrie:
        """Complete sequences allow the end-of-sequence ids. Raises InvalidRequest of this field."""
        if not len(sequences) or not sequences.lengths.all():
            raise InvalidRequest(field, "needs sequences, none of them empty")
        longest = int(sequences.lengths.max())
        if longest > self._longest:
            raise InvalidRequest(
                field, f"a sequence has {longest} tokens; the model's context has {self._longest}"
            )
        due = time.monotonic() + self._max_ms / 1e3

        def go_on() -> None:
            if time.monotonic() > due:
                raise InvalidRequest(field, f"takes longer than max_compile_ms ({self._max_ms} ms)")

        trie = build_trie(
            sequences, vocab_size=self._vocab_size, end_ids=self._end_ids, go_on=go_on
        )
        if trie.holds(self._end_ids):
            raise InvalidRequest(field, "holds an end-of-sequence token")
        return trie
