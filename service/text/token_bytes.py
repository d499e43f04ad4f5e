"""The bytes that each token stands for, from a tokenizer's vocabulary."""

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

SPACE_MARK = "▁"  # of SentencePiece vocabularies


def token_bytes(encoder: tokenizers.Tokenizer) -> tuple[bytes, ...]:
    """By token id; special tokens stand for nothing. Raises ValueError for an unknown decoder."""
    decoders = _decoder_types(json.loads(encoder.to_str())["decoder"])
    vocabulary = encoder.get_vocab(with_added_tokens=True)
    added = encoder.get_added_tokens_decoder()
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id in added:
            table[token_id] = b"" if added[token_id].special else _added(token, decoders)
        elif "ByteLevel" in decoders:
            table[token_id] = token.translate(CHARACTER_BYTES).encode("latin-1")
        elif "ByteFallback" in decoders or "Metaspace" in decoders:
            table[token_id] = _sentence_piece(token)
        else:
            raise ValueError(f"cannot stream text through the tokenizer's decoders {decoders}")
    return tuple(table)


def _decoder_types(decoder: Mapping[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"], *(part["type"] for part in decoder.get("decoders", ()))}


def _character_bytes() -> dict[int, str]:
    """ByteLevel writes printable Latin-1 as itself, other bytes as characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = printable + [0x100 + index for index in range(len(others))]
    return {
        character: chr(byte) for character, byte in zip(characters, printable + others, strict=True)
    }


CHARACTER_BYTES = _character_bytes()


def _added(token: str, decoders: set[str]) -> bytes:
    if "ByteLevel" in decoders and all(ord(character) in CHARACTER_BYTES for character in token):
        return token.translate(CHARACTER_BYTES).encode("latin-1")
    return token.encode()


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace(SPACE_MARK, " ").encode()
