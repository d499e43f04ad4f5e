"""What a Generate request may ask of a beam search, and what it then asks for."""

from collections.abc import Set

from stemserve.proto.v1 import inference_pb2
from stemserve.service.batching.beams.beam_state import candidates_needed
from stemserve.service.calls.generation.generate_counts import new_tokens, sample_count
from stemserve.service.calls.validation import check_count
from stemserve.service.errors import InvalidRequest
from stemserve.service.limits import Limits
from stemserve.service.request import BeamSpec, EarlyStopping, WorkerFacts

# Longer answers than a context of 131,072 tokens keep their scores inside float32 with these.
MAX_LENGTH_PENALTY = 4.0
MAX_CANDIDATES = 1 << 20  # that a search reads after each token
ANSWER_BYTES = 64  # of a token, its text and log-probability included
MODES = {
    inference_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    inference_pb2.EARLY_STOPPING_HEURISTIC: EarlyStopping.HEURISTIC,
    inference_pb2.EARLY_STOPPING_FIRST: EarlyStopping.FIRST,
    inference_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
TOKEN_SETS = frozenset({"token_sequences", "trie_id"})  # constraints whose ends are the request's
# All others change what is drawn, or when a sample ends.
POSSIBLE = frozenset(
    {
        "request_id",
        "prompt",
        "chat",
        "n",
        "max_new_tokens",
        "min_new_tokens",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "priority",
        "kernel",
        "beam_search",
        "choice",
        "regex",
        "json_schema",
        "grammar",
        "token_sequences",
        "trie_id",
    }
)


def check_beams(request: inference_pb2.GenerateRequest, limits: Limits, facts: WorkerFacts) -> None:
    """Raises InvalidRequest."""
    search, best = request.beam_search, sample_count(request)
    for field, _ in request.ListFields():
        if field.name == "sampling":
            for inner, _ in request.sampling.ListFields():
                _refuse(f"sampling.{inner.name}")
        elif field.name not in POSSIBLE:
            _refuse(field.name)
    if not search.width:
        raise InvalidRequest("beam_search.width", "must be at least 1")
    most = min(limits.max_beams, facts.sampler_slots)
    check_count("beam_search.width", search.width, "max_beams", most)
    if best > search.width:
        raise InvalidRequest("n", f"{best} is more than beam_search.width ({search.width})")
    if not abs(search.length_penalty) <= MAX_LENGTH_PENALTY:  # NaN too
        raise InvalidRequest(
            "beam_search.length_penalty",
            f"{search.length_penalty} is not in -{MAX_LENGTH_PENALTY:g} .. {MAX_LENGTH_PENALTY:g}",
        )
    if search.early_stopping not in MODES:
        raise InvalidRequest(
            "beam_search.early_stopping", f"there is no mode {search.early_stopping}"
        )
    tokens = min(new_tokens(request), facts.context_tokens)
    allowed = limits.max_message_bytes
    check_count("n", best * tokens * ANSWER_BYTES, "max_message_bytes, for the answer", allowed)


def beam_spec(request: inference_pb2.GenerateRequest) -> BeamSpec | None:
    """Of a request that was checked."""
    if not request.HasField("beam_search"):
        return None
    search = request.beam_search
    penalty = search.length_penalty if search.HasField("length_penalty") else 1.0
    # The shortest decimal of the float32: 0.6 is not to be 0.60000002384.
    return BeamSpec(
        width=search.width,
        best=sample_count(request),
        length_penalty=float(f"{penalty:.7g}"),
        early_stopping=MODES[search.early_stopping],
        min_new_tokens=request.min_new_tokens,
    )


def check_end(request: inference_pb2.GenerateRequest, end_ids: Set[int], vocab_size: int) -> None:
    """Under a constraint an end says where an output is whole. Raises InvalidRequest."""
    kind = request.WhichOneof("constraint")
    if kind is None:
        return
    if kind not in TOKEN_SETS and request.stop_token_ids:
        raise InvalidRequest("stop_token_ids", f"not in a search under {kind}: an EOS ends it")
    if all(token >= vocab_size for token in end_ids):
        raise InvalidRequest(
            "beam_search", "a constraint needs a token that ends an output; give stop_token_ids"
        )


def check_candidates(beams: BeamSpec, end_ids: Set[int], vocab_size: int) -> None:
    """Raises InvalidRequest."""
    count = beams.width * candidates_needed(beams, end_ids, vocab_size)
    what = "candidates a search may read after each token"
    check_count("beam_search.width", count, what, MAX_CANDIDATES)


def _refuse(field: str) -> None:
    raise InvalidRequest(field, "cannot be given together with beam_search")
