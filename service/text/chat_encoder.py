"""Token ids of a chat that a template has written."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers

from stemserve.service.errors import InvalidRequest
from stemserve.service.packed_tokens import PackedTokens, pack
from stemserve.service.request import Int32
from stemserve.service.text.chat_marks import NEUTRAL, SURROGATES, SpecialTexts


class ChatEncoder:
    """Special tokens are those that the template wrote; a BOS is there only if it wrote one."""

    def __init__(self, front: tokenizers.Tokenizer) -> None:
        self._front = front
        added = front.get_added_tokens_decoder()
        self._specials = {i: token.content for i, token in added.items() if token.special}
        self.texts = SpecialTexts(self._specials.values())

    def encode(self, written: str, *, at_front: bool = True) -> Int32:
        """Of text with stand-ins (chat_marks.py), at the front of a sequence or behind another."""
        neutral = SURROGATES.sub(NEUTRAL, written)
        encoding = self._front.encode(neutral, add_special_tokens=False)
        if neutral == written and at_front:
            return np.array(encoding.ids, dtype=np.int32)
        ids, end = list[int](), 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            # A tokenizer may also give its special "unknown" token to any character.
            if self._specials.get(token_id) == neutral[start:stop].strip():
                ids += self._plain(written[end:start], at_front=at_front and not end)
                ids.append(token_id)
                end = stop
        ids += self._plain(written[end:], at_front=at_front and not end)
        return np.array(ids, dtype=np.int32)

    def encode_texts(self, texts: Sequence[str]) -> PackedTokens:
        """Of texts that follow others, without any special token. Raises InvalidRequest."""
        encoder = self._plain_encoders[1]
        encodings = encoder.encode_batch_fast(list(texts), add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            self._check_plain(encoding.ids, text)
        return pack([np.array(encoding.ids, dtype=np.int32) for encoding in encodings])

    def _plain(self, part: str, *, at_front: bool) -> list[int]:
        """As between two special tokens, but without any in it."""
        if not part:
            return []
        encoder = self._plain_encoders[0 if at_front else 1]
        text = self.texts.restore(part)
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        self._check_plain(ids, text)
        return ids

    def _check_plain(self, ids: Sequence[int], text: str) -> None:
        for token_id in self._specials.keys() & ids:
            if self._specials[token_id] in text:
                raise InvalidRequest(
                    "chat",
                    f"this model's tokenizer cannot write {self._specials[token_id]!r} as text",
                )

    @cached_property
    def _plain_encoders(self) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer]:
        """For the front of a text, and for what follows a special token."""
        definition = json.loads(self._front.to_str())
        middle = {**definition, "pre_tokenizer": _not_first(definition["pre_tokenizer"])}
        front = _without_specials(definition)
        return front, front if middle == definition else _without_specials(middle)


def _without_specials(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    encoder = tokenizers.Tokenizer.from_str(json.dumps(definition))
    encoder.encode_special_tokens = True  # that is, as any other text
    return encoder


def _not_first(part: dict[str, Any] | None) -> dict[str, Any] | None:
    match part:
        case None:
            return None
        case {"type": "Sequence"}:
            children = [_not_first(child) for child in part["pretokenizers"]]
            return {**part, "pretokenizers": children}
        case {"type": "Metaspace", "prepend_scheme": "first"}:
            return {**part, "prepend_scheme": "never"}
        case _:
            return part
