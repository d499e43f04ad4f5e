"""Keep the text of special tokens in a chat's messages from becoming these tokens.

In what the caller sent, one character of each special token's text is replaced by a stand-in: a
high surrogate, which no valid text holds. A template handles it as it handles any character. What
it writes itself holds no stand-ins, so that its own special tokens can still be told.
"""

import re
from collections.abc import Iterable
from typing import Any, cast

FIRST_STAND_IN = 0xD800
CUT = chr(0xDBFF)  # where a message that is to be continued ends
MOST_STAND_INS = ord(CUT) - FIRST_STAND_IN
SURROGATES = re.compile("[\ud800-\udfff]")
NEUTRAL = "\ufdd0"  # no character either, but one that a tokenizer takes

_Trie = dict[str, "_Trie"]
END = ""  # key of a trie's node at which a text ends


class SpecialTexts:
    def __init__(self, texts: Iterable[str]) -> None:
        """Of the special tokens."""
        self._texts = frozenset(filter(None, texts))
        characters = sorted(set("".join(self._texts)))
        if len(characters) > MOST_STAND_INS:
            raise ValueError(f"special tokens have more than {MOST_STAND_INS} different characters")
        self._stand_ins = {c: chr(FIRST_STAND_IN + i) for i, c in enumerate(characters)}
        self._originals = {ord(s): c for c, s in self._stand_ins.items()}
        self._whole = re.compile(_pattern(_trie(self._texts))) if self._texts else None
        self._starts = frozenset(text[:n] for text in self._texts for n in range(1, len(text)))
        self._ends = frozenset(text[n:] for text in self._texts for n in range(1, len(text)))
        self._longest = max(map(len, self._texts), default=0)

    def hide(self, value: Any) -> Any:
        """The same JSON value, keys too, with stand-ins."""
        match value:
            case str():
                return self._hide_text(value)
            case dict():
                items = cast(dict[str, Any], value)
                return {self._hide_text(key): self.hide(item) for key, item in items.items()}
            case [*entries]:
                return [self.hide(entry) for entry in entries]
            case _:
                return value

    def restore(self, text: str) -> str:
        return text.translate(self._originals)

    def inside(self, text: str) -> str | None:
        """A special token that a template could put together around this text."""
        return next((special for special in sorted(self._texts) if text in special), None)

    def _hide_text(self, text: str) -> str:
        if self._whole is None or not text:
            return text
        places = {found.start() for found in self._whole.finditer(text)}
        places |= self._at_the_edges(text)
        if not places:
            return text
        characters = list(text)
        for place in places:
            characters[place] = self._stand_ins[text[place]]
        return "".join(characters)

    def _at_the_edges(self, text: str) -> set[int]:
        """What could become a special token with what the template puts beside it."""
        lengths = range(1, min(len(text), self._longest) + 1)
        places = {len(text) - n for n in lengths if text[-n:] in self._starts}
        if any(text[:n] in self._ends for n in lengths):
            places.add(0)
        return places


def _trie(texts: Iterable[str]) -> _Trie:
    root: _Trie = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[END] = {}
    return root


def _pattern(node: _Trie) -> str:
    """Of the longest text that begins here, found in one step a character."""
    branches = [re.escape(c) + _pattern(child) for c, child in sorted(node.items()) if c]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)})" + ("?" if END in node else "")
