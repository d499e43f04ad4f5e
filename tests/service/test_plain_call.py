"""Plain calls come out as the encoder that looks at all that a call can be makes them."""

import asyncio
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.service.score_calls import ids
from tests.service.test_validation_fuzz import ODD_SCORES

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import ANYONE, Caller
from stemserve.service.calls.context_encoder import ContextEncoder
from stemserve.service.calls.prefixes.prefix_registry import PrefixRegistry, RegistryBounds
from stemserve.service.calls.scores.plain_call import PlainCalls
from stemserve.service.calls.scores.score_call import ScoreCall
from stemserve.service.calls.scores.score_encoder import ScoreEncoder
from stemserve.service.errors import RequestError
from stemserve.service.limits import Limits
from stemserve.service.packed_tokens import PackedTokens, pack
from stemserve.service.request import Int32, WorkerFacts
from stemserve.service.text.tokenizer import Tokenizer, TokenizerPool

ScoreRequest = inference_pb2.ScoreRequest
VOCAB, CONTEXT_TOKENS = 50, 12
LIMITS = Limits(max_request_tokens=40, max_items=6, max_labels=3, max_message_bytes=700)
FACTS = WorkerFacts(
    model="none",
    architecture="none",
    dtype="float32",
    device="none",
    vocab_size=VOCAB,
    context_tokens=CONTEXT_TOKENS,
    layers=1,
    query_heads=1,
    kv_heads=1,
    head_dim=1,
    page_size=16,
    kv_pages=10,
    sampler_slots=1,
    steps_in_flight=2,
    has_lm_head=True,
    class_labels=(),
    kv_bytes_per_token=1,
)
HASTY = replace(ANYONE, max_priority=2)


def blob(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


TOKENS = st.lists(st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB, 2**32 - 1]), max_size=9)
GOOD_TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8)


def packed(items: list[list[int]]) -> inference_pb2.PackedTokens:
    together = pack([ids(*item) for item in items])
    return inference_pb2.PackedTokens(
        tokens=together.tokens.astype("<u4").tobytes(), offsets=together.indptr.tolist()
    )


CLOSE_TO_PLAIN = st.builds(
    ScoreRequest,
    request_id=st.sampled_from(["", "mine", "x" * 256, "x" * 257]),
    contexts=st.lists(
        st.one_of(GOOD_TOKENS, TOKENS).map(lambda t: inference_pb2.Context(tokens=blob(t))),
        min_size=1,
        max_size=2,
    ),
    item_tokens=st.lists(GOOD_TOKENS, min_size=1, max_size=8).map(packed),
    label_probabilities=st.builds(
        inference_pb2.LabelProbabilities,
        label_token_ids=st.lists(st.integers(-1, VOCAB), max_size=4),
        apply_softmax=st.booleans(),
    ),
    top_n=st.integers(0, 3),
    priority=st.integers(-3, 3),
    partial_results=st.booleans(),
)


def encoder(facts: WorkerFacts, threads: ThreadPoolExecutor) -> ScoreEncoder:
    registry = PrefixRegistry(RegistryBounds(max_prefixes=1, max_tokens=1), clock=lambda: 0.0)
    pool = TokenizerPool(Tokenizer(encoders=None, token_bytes=()), threads, long_executor=threads)
    contexts = ContextEncoder(pool, registry, vocab_size=VOCAB, limits=LIMITS)
    return ScoreEncoder(contexts, pool, LIMITS, facts)


def in_full(request: ScoreRequest, caller: Caller, facts: WorkerFacts) -> ScoreCall | RequestError:
    with ThreadPoolExecutor(1) as threads:
        whole = encoder(facts, threads).encode_any(request, caller)
        try:
            return asyncio.run(whole)
        except RequestError as error:
            return error


def assert_same(found: ScoreCall, wanted: ScoreCall) -> None:
    for field in fields(wanted):
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(other, PackedTokens):
            assert_same_ids([one.tokens, one.indptr], [other.tokens, other.indptr])
        elif field.name in ("item_context", "query"):
            assert_same_ids([one], [other])
        elif field.name == "contexts":
            assert_same_ids(one, other)
        else:
            assert one == other


def assert_same_ids(found: Sequence[Int32], wanted: Sequence[Int32]) -> None:
    assert [array.dtype for array in found] == [array.dtype for array in wanted]
    assert [array.tolist() for array in found] == [array.tolist() for array in wanted]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(request=st.one_of(CLOSE_TO_PLAIN, ODD_SCORES), caller=st.sampled_from([ANYONE, HASTY]))
@example(
    request=ScoreRequest(
        contexts=[inference_pb2.Context(tokens=blob([3, 4]))],
        item_tokens=packed([[5], [6, 7]]),
        label_probabilities=inference_pb2.LabelProbabilities(label_token_ids=[1, 2]),
    ),
    caller=ANYONE,
)
def test_what_is_taken_for_plain_is_what_the_whole_encoder_makes(
    request: ScoreRequest, caller: Caller
) -> None:
    found = PlainCalls(LIMITS, FACTS).decode(request, caller)
    if found is not None:
        wanted = in_full(request, caller, FACTS)
        assert isinstance(wanted, ScoreCall), f"refused: {wanted}"
        assert_same(found, wanted)


def plain(**changes: Any) -> ScoreRequest:
    call: dict[str, Any] = {
        "contexts": [inference_pb2.Context(tokens=blob([3, 4]))],
        "item_tokens": packed([[5], [6, 7]]),
        "label_probabilities": inference_pb2.LabelProbabilities(label_token_ids=[1, 2]),
    }
    return ScoreRequest(**{**call, **changes})


def test_a_plain_call_is_decoded() -> None:
    for request in (plain(), plain(top_n=1, priority=3, request_id="r", partial_results=True)):
        found = PlainCalls(LIMITS, FACTS).decode(request, ANYONE)
        assert found is not None
        assert found.labels == ((1,), (2,))
        assert [found.items[i].tolist() for i in range(2)] == [[5], [6, 7]]
        assert found.contexts[0].tolist() == [3, 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"contexts": [inference_pb2.Context(text="a")]},
        {"contexts": [inference_pb2.Context(tokens=blob([3]), prefix_id="p")]},
        {"contexts": [inference_pb2.Context(tokens=blob([VOCAB]))]},
        {"contexts": [inference_pb2.Context(tokens=b"abc")]},
        {"contexts": [inference_pb2.Context(tokens=blob([1] * CONTEXT_TOKENS))]},
        {"item_tokens": packed([[5], [VOCAB]])},
        {"item_tokens": inference_pb2.PackedTokens(tokens=blob([5, 6]), offsets=[0, 0, 2])},
        {"item_tokens": inference_pb2.PackedTokens(tokens=blob([5, 6]), offsets=[0, 1])},
        {"item_tokens": inference_pb2.PackedTokens(tokens=blob([5, 6]), offsets=[0, 2**32 - 1, 2])},
        {"item_tokens": packed([[5]] * 7)},
        {"label_probabilities": inference_pb2.LabelProbabilities(label_token_ids=[1, 1])},
        {"label_probabilities": inference_pb2.LabelProbabilities(label_token_ids=[1, 2, 3, 4])},
        {"label_probabilities": inference_pb2.LabelProbabilities(labels=["a"])},
        {"kernel": inference_pb2.KERNEL_CASCADE},
        {"item_context": [0, 0]},
        {"truncate_item_tokens": 1},
        {"request_id": "x" * 257},
    ],
)
def test_any_other_call_is_left_to_the_whole_encoder(changes: dict[str, Any]) -> None:
    assert PlainCalls(LIMITS, FACTS).decode(plain(**changes), ANYONE) is None


def test_a_model_without_an_lm_head_and_a_priority_too_high_are_left_to_it() -> None:
    headless = replace(FACTS, has_lm_head=False, class_labels=("a",))
    assert PlainCalls(LIMITS, headless).decode(plain(), ANYONE) is None
    assert PlainCalls(LIMITS, FACTS).decode(plain(priority=3), HASTY) is None
    assert PlainCalls(LIMITS, FACTS).decode(plain(priority=2), HASTY) is not None
