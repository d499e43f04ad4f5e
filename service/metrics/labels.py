"""The buckets of the histograms, and the values that labels take."""

from collections.abc import Mapping
from itertools import product

from stemserve.service.errors import (
    DeadlinePassed,
    InvalidRequest,
    NeverFits,
    NotReady,
    PrefixesFull,
    QueueFull,
    QuotaExceeded,
    RequestError,
    TriesFull,
    Unauthenticated,
)

# Seconds; the threshold of an objective must equal a bound.
TTFT = (
    *(0.005, 0.01, 0.02, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 10, 20, 40),
)
TPOT = (0.002, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
ITEM = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1)
COMPILE = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
QUEUE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
STEP = (0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
RPC = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.25, 0.3, 0.5),
    *(1, 2.5, 5, 10, 30, 60, 120),
)
RATIO = (0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.11, 1.25, 1.5, 2, 4)
SHARE = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)
COUNT = tuple(2**power for power in range(13))
ROWS = tuple(2**power for power in range(15))  # a step has up to 9,216

METHODS = ("score", "score_stream", "generate", "register", "get", "list", "renew", "release")
TRIE_METHODS = ("upload_trie", "get_trie", "list_tries", "delete_trie")
INFO_METHODS = ("get_model", "get_limits", "get_load", "explain")
CODES = (
    "OK",
    "CANCELLED",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "RESOURCE_EXHAUSTED",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
)
AUTH_FAILURES = ("no_credential", "unknown_tenant", "bad_signature", "expired", "no_cert")
PRIORITIES = ("low", "normal", "high")  # below, at and above 0
REJECTIONS: Mapping[type[RequestError], str] = {
    Unauthenticated: "unauthenticated",
    InvalidRequest: "invalid",
    QueueFull: "queue_full",
    QuotaExceeded: "tenant_quota",
    NeverFits: "too_large",
    PrefixesFull: "too_large",
    TriesFull: "too_large",
    DeadlinePassed: "deadline",
    NotReady: "not_ready",
}
CONSTRAINTS = ("choice", "regex", "json_schema", "grammar", "token_sequences", "trie_id")
SPANS = ("exported", "queue_full", "refused", "stopped")
PHASES = ("prefill", "decode", "mixed")
SCORE_MODES = ("label_probabilities", "log_likelihood", "classification")
PREFILL_PATHS = ("naive", "split", "ragged", "cascade", "multi_item", "custom_mask", "codec")
DECODE_PATHS = ("paged", "cascade", "codec")
OP_PATHS = (*product(("prefill",), PREFILL_PATHS), *product(("decode",), DECODE_PATHS))
REASONS = ("cost_model", "forced", "fallback", "only", "graph")
FALLBACK = "fallback"
FALLBACKS = ("refused", "withheld", "lacking")
GRAPH_PATHS = ("decode_graph", "pieces")
GRAPH_FALLBACKS = ("rows", "plan", "dropped", "launcher")


def cached_part(cached_tokens: int, tokens: int) -> str:
    """A value of `result`. Of the last token something is computed in any case."""
    if not cached_tokens:
        return "miss"
    return "full" if cached_tokens >= tokens - 1 else "partial"
