"""Decode the token ids of a message, and refuse what is not one."""

from collections.abc import Sequence

import numpy as np

from stemserve.proto.v1 import inference_pb2
from stemserve.service.errors import InvalidRequest
from stemserve.service.packed_tokens import PackedTokens
from stemserve.service.request import Int32

TOKEN_BYTES = 4
NO_IDS: Int32 = np.zeros(0, dtype=np.int32)


def decode_tokens(field: str, blob: bytes, vocab_size: int) -> Int32:
    if len(blob) % TOKEN_BYTES:
        raise InvalidRequest(field, f"{len(blob)} bytes are not a whole number of 4-byte token ids")
    wire = np.frombuffer(blob, dtype="<u4")
    if wire.size and wire.max() >= vocab_size:
        index = int(np.argmax(wire >= vocab_size))
        raise InvalidRequest(
            field, f"token {index} is {wire[index]}; ids of this model are below {vocab_size}"
        )
    return wire.astype(np.int32, copy=False).view(np.int32)


def decode_packed(field: str, message: inference_pb2.PackedTokens, vocab_size: int) -> PackedTokens:
    tokens = decode_tokens(f"{field}.tokens", message.tokens, vocab_size)
    offsets = message.offsets
    if not offsets or offsets[0] != 0 or offsets[-1] != len(tokens):
        raise InvalidRequest(
            f"{field}.offsets", f"must start with 0 and end with {len(tokens)}, the token count"
        )
    indptr = np.array(offsets, dtype=np.int64)
    if (indptr[1:] < indptr[:-1]).any():
        raise InvalidRequest(f"{field}.offsets", "must not decrease")
    return PackedTokens(tokens=tokens, indptr=indptr.astype(np.int32))


def decode_ids(field: str, ids: Sequence[int], vocab_size: int) -> Int32:
    if not ids:
        return NO_IDS
    wire = np.fromiter(ids, dtype=np.int64, count=len(ids))
    bad = ((wire < 0) | (wire >= vocab_size)).nonzero()[0]
    if len(bad):
        raise InvalidRequest(
            field, f"{wire[bad[0]]} is not a token id; ids are 0 to {vocab_size - 1}"
        )
    return wire.astype(np.int32)


def check_known(field: str, tokens: Int32, vocab_size: int) -> Int32:
    """For a tokenizer with added tokens that the model has no logits for."""
    if tokens.size and tokens.max() >= vocab_size:
        raise InvalidRequest(
            field, f"the text holds token {tokens.max()}; ids of this model are below {vocab_size}"
        )
    return tokens
