"""What the client library returns: small values with numpy arrays."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """prompt_tokens = cached_tokens + shared_tokens + computed_tokens."""

    prompt_tokens: int
    cached_tokens: int
    shared_tokens: int
    computed_tokens: int
    output_tokens: int
    kv_read_bytes: int
    kv_avoided_bytes: int
    drafted_tokens: int = 0  # guessed ahead and verified
    accepted_tokens: int = 0  # of those: guessed right


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    total_seconds: float
    tokenize_seconds: float
    queue_seconds: float
    engine_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemError:
    index: int
    code: int  # google.rpc.Code
    message: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    scores: Float32  # [items], [items, labels] or [items, classes]; NaN for an item with an error
    item_index: Int64  # [rows] the item of each row
    label_mass: Float32  # [rows]; empty in other modes
    is_greedy: NDArray[np.bool_]  # [rows]; empty in other modes
    token_logprobs: tuple[Float32, ...]  # by row; empty unless asked for
    errors: tuple[ItemError, ...]
    usage: Usage
    timing: Timing
    over_labels: bool
    partial: bool  # the deadline came first: items that are not scored have an error
    more: bool = False  # a part of an answer of which another follows; only the last has usage


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNews:
    """What a step brought to one sample."""

    sample: int
    text: str
    token_ids: tuple[int, ...]
    finish: str  # "", "stop", "length", or "none_left": a search has no such sequence
    logprobs: tuple[float, ...] = ()  # by token, if asked for
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # by token, most likely first
    asked_logprobs: tuple[tuple[float, ...], ...] = ()  # by token, of the request's ids; or empty
    score: float | None = None  # of a beam search


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateStep:
    news: tuple[SampleNews, ...]
    usage: Usage | None = None  # in the last step
    timing: Timing | None = None
    prompt_logprobs: Float32 | None = None  # in the last step, if asked for; not of the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    prefix_id: str
    parent_prefix_id: str
    token_count: int
    resident_tokens: int
    pinned: bool
    shared: bool  # with the tenant's sharing group
    ttl_seconds: float  # 0: no expiry
    expires_unix_seconds: float  # 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class Trie:
    """An uploaded set of token sequences."""

    trie_id: str
    sequences: int  # that differ
    nodes: int
    num_bytes: int  # of the server's memory
    ttl_seconds: float
    expires_unix_seconds: float
