"""Any request at all gets an answer or a proper status."""

import struct

import grpc
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.service.bigram_engine import BigramEngine
from tests.service.serving import serving

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.client import ClientError

ScoreRequest = inference_pb2.ScoreRequest
GenerateRequest = inference_pb2.GenerateRequest


def words(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


TEXT = st.text(max_size=8)
ODD_FLOATS = st.floats(width=32)
ODD_IDS = st.one_of(st.integers(-2, 5), st.sampled_from([2**31, -(2**63), 2**63 - 1]))
BLOBS = st.one_of(
    st.binary(max_size=9), st.lists(st.integers(0, 4), max_size=6).map(lambda t: words(*t))
)
CONTEXTS = st.one_of(
    st.builds(inference_pb2.Context, prefix_id=st.sampled_from(["", "p"]), text=TEXT),
    st.builds(inference_pb2.Context, prefix_id=st.sampled_from(["", "p"]), tokens=BLOBS),
)
PACKED = st.builds(
    inference_pb2.PackedTokens,
    tokens=BLOBS,
    offsets=st.lists(st.integers(0, 7), max_size=5).map(sorted),
)
LABELS = st.builds(
    inference_pb2.LabelProbabilities,
    labels=st.lists(TEXT, max_size=2),
    label_token_ids=st.lists(ODD_IDS, max_size=3),
    label_tokens=st.one_of(st.none(), PACKED),
    apply_softmax=st.booleans(),
    temperature=ODD_FLOATS,
)
KERNELS = st.integers(-1, 12)
ODD_SCORES = st.builds(
    ScoreRequest,
    query=TEXT,
    contexts=st.lists(CONTEXTS, max_size=3),
    items=st.lists(TEXT, max_size=3),
    item_tokens=st.one_of(st.none(), PACKED),
    item_context=st.lists(st.integers(0, 3), max_size=3),
    item_first=st.booleans(),
    label_probabilities=st.one_of(st.none(), LABELS),
    truncate_item_tokens=st.one_of(st.none(), st.sampled_from([0, 1, 2**32 - 1])),
    top_n=st.sampled_from([0, 1, 2**32 - 1]),
    priority=st.sampled_from([0, -(2**31), 2**31 - 1]),
    kernel=KERNELS,
)
SAMPLING = st.builds(
    inference_pb2.SamplingParams,
    temperature=st.one_of(st.none(), ODD_FLOATS),
    top_k=st.sampled_from([0, 1, 2**32 - 1]),
    top_p=st.one_of(st.none(), ODD_FLOATS),
    min_p=ODD_FLOATS,
    repetition_penalty=ODD_FLOATS,
    presence_penalty=ODD_FLOATS,
    frequency_penalty=ODD_FLOATS,
    seed=st.one_of(st.none(), st.sampled_from([0, 2**64 - 1])),
    logit_bias=st.dictionaries(ODD_IDS, ODD_FLOATS, max_size=2),
    banned_token_ids=st.lists(ODD_IDS, max_size=3),
    allowed_token_ids=st.lists(ODD_IDS, max_size=3),
)
ODD_GENERATES = st.builds(
    GenerateRequest,
    prompt=CONTEXTS,
    sampling=SAMPLING,
    n=st.one_of(st.none(), st.integers(0, 4)),
    max_new_tokens=st.one_of(st.none(), st.sampled_from([0, 1, 3, 2**32 - 1])),
    min_new_tokens=st.sampled_from([0, 1, 2**32 - 1]),
    stop=st.lists(TEXT, max_size=2),
    stop_token_ids=st.lists(ODD_IDS, max_size=2),
    ignore_eos=st.booleans(),
    top_logprobs=st.sampled_from([0, 1, 2**32 - 1]),
    kernel=KERNELS,
)
GOOD_BLOBS = st.lists(st.integers(0, 4), max_size=6).map(lambda tokens: words(*tokens))
GOOD_CONTEXTS = st.one_of(
    st.builds(inference_pb2.Context, prefix_id=st.sampled_from(["", "p"]), text=TEXT),
    st.builds(inference_pb2.Context, prefix_id=st.sampled_from(["", "p"]), tokens=GOOD_BLOBS),
)
LABEL_IDS = st.lists(st.integers(0, 257), min_size=1, max_size=4, unique=True)
LABEL_TEXTS = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4, unique=True)


@st.composite
def scores(draw: st.DrawFn) -> ScoreRequest:
    """A good request, or one with odd fields merged in."""
    items = draw(st.lists(TEXT, min_size=1, max_size=5))
    request = ScoreRequest(items=items, top_n=draw(st.integers(0, 3)))
    request.item_first = draw(st.booleans())
    if request.item_first or draw(st.booleans()):
        request.query = draw(st.text(min_size=1, max_size=5))
    if request.item_first or not request.query:
        contexts = draw(st.lists(GOOD_CONTEXTS, min_size=1, max_size=3))
        request.contexts.extend(contexts)
        request.item_context.extend(draw(st.integers(0, len(contexts) - 1)) for _ in items)
    match draw(st.integers(0, 2)):
        case 0:
            request.log_likelihood.token_logprobs = draw(st.booleans())
        case 1:
            request.label_probabilities.label_token_ids.extend(draw(LABEL_IDS))
        case _:
            request.label_probabilities.labels.extend(draw(LABEL_TEXTS))
    if draw(st.integers(0, 2)) == 0:
        request.MergeFrom(draw(ODD_SCORES))
    return request


@st.composite
def generates(draw: st.DrawFn) -> GenerateRequest:
    request = GenerateRequest(prompt=draw(GOOD_CONTEXTS), max_new_tokens=3)
    request.n = draw(st.integers(1, 3))
    request.min_new_tokens = draw(st.integers(0, 3))
    request.prompt_logprobs = draw(st.booleans())
    request.stop.extend(draw(st.lists(st.text("ab", min_size=1), max_size=2)))
    if draw(st.integers(0, 2)) == 0:
        request.MergeFrom(draw(ODD_GENERATES))
    return request


PROPER = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
}
FUZZ = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)


def uniform_engine() -> BigramEngine:
    return BigramEngine(np.full((258, 258), 1 / 258))


@FUZZ
@given(request=scores())
async def test_any_score_request_gets_an_answer_or_a_proper_status(request: ScoreRequest) -> None:
    async with serving(uniform_engine()) as served:
        await served.client.register(prefixes_pb2.RegisterRequest(prefix_id="p", text="p"))
        try:
            scores = await served.client.score_request(request)
        except ClientError as error:
            assert error.code in PROPER
        else:
            failed = {error.index for error in scores.errors}
            for item, row in zip(scores.item_index, scores.scores, strict=True):
                assert np.isnan(row).all() == (int(item) in failed)
            assert not request.top_n or len(scores.item_index) <= request.top_n


@FUZZ
@given(request=generates())
async def test_any_generate_request_gets_tokens_or_a_proper_status(
    request: GenerateRequest,
) -> None:
    async with serving(uniform_engine()) as served:
        await served.client.register(prefixes_pb2.RegisterRequest(prefix_id="p", text="p"))
        try:
            steps = [step async for step in served.client.generate(request)]
        except ClientError as error:
            assert error.code in PROPER
        else:
            ended = [news.sample for step in steps for news in step.news if news.finish]
            assert sorted(ended) == list(range(request.n or 1))
            assert steps[-1].usage is not None
