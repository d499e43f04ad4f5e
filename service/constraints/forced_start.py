"""How far a grammar leaves a model no choice from its start on.

The library follows what is forced to its end, and its limits hold from the first choice on only:
the start of `(a{9999}){9999}` would take it minutes and gigabytes.
"""

import json
from collections.abc import Sequence

import llguidance
import numpy as np

MOST_BYTES = 16_384
MOST_TOKENS = 1024  # that begin one another: a longer list is a choice
OPTION = '%llguidance {"no_forcing": true}\n'


def unforced(grammar: str) -> str:
    """The same grammar, in the library's words, that is followed no further than it is asked to."""
    if not grammar.startswith("{"):
        return OPTION + grammar
    (part,) = json.loads(grammar)["grammars"]
    schema = part["json_schema"]
    text = part["lark_grammar"] if schema is None else f"start: %json {json.dumps(schema)}"
    return OPTION + text


def start_problem(matcher: llguidance.LLMatcher, texts: Sequence[bytes]) -> str | None:
    """`matcher`: of an unforced grammar; `texts` of the tokens. None: a choice comes in time."""
    bits = np.zeros(-(-len(texts) // 32) * 4, np.uint8)
    followed = 0
    while followed <= MOST_BYTES:
        if matcher.is_accepting() or matcher.is_stopped():
            return None
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, len(bits))
        if matcher.is_error():
            return f"cannot be followed: {matcher.get_error()}"
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        token = None if len(allowed) > MOST_TOKENS else _only_way(allowed.tolist(), texts)
        if token is None:
            return None
        matcher.consume_token(token)
        followed += max(1, len(texts[token]))
    return f"begins with more than {MOST_BYTES} bytes that leave the model no choice"


def _only_way(allowed: Sequence[int], texts: Sequence[bytes]) -> int | None:
    """The longest of tokens that begin one another; None: there is a choice."""
    longest = max(allowed, key=lambda token: len(texts[token]), default=None)
    if (
        longest is None or not texts[longest]
    ):  # special tokens; the mask does not always tell them apart
        return longest
    if len(allowed) > len(texts[longest]):
        return None
    begins = all(texts[token] and texts[longest].startswith(texts[token]) for token in allowed)
    return longest if begins else None
