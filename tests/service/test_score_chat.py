"""Scores of items in a chat: which tokens reach the engine, and what is refused."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.service.bigram_engine import BigramEngine, random_bigrams
from tests.service.chat_models import SPECIALS, chat_folder, expected_ids
from tests.service.serving import Served, serving

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import ClientError, chat_request
from stemserve.service.request import ScoreJob
from stemserve.service.text.tokenizer_files import load_tokenizer

VOCABULARY = 300
LABELS = inference_pb2.LabelProbabilities(label_token_ids=[5, 9])
LIKELIHOOD = inference_pb2.LogLikelihood()
MARKER = "{item}"
ITEMS = ["alone", "oh hello", "世🙂"]
JUDGE: Sequence[Mapping[str, Any]] = [
    {"role": "user", "content": "Query: hi\nDocument: {item}\nRelevant?"}
]
THINKING = {"enable_thinking": False}


@asynccontextmanager
async def chatting(
    folder: Path, name: str = "chatml", source: str | None = None
) -> AsyncGenerator[Served]:
    tokenizer = load_tokenizer(chat_folder(folder, name, source))
    engine = BigramEngine(random_bigrams(VOCABULARY), context_tokens=1_000)
    async with serving(engine, tokenizer) as served:
        yield served


def sequences(served: Served) -> list[list[int]]:
    """Of the last job: each unit behind its context."""
    job = served.engine.jobs[-1]
    assert isinstance(job, ScoreJob)
    starts: list[int] = job.unit_indptr.tolist()
    contexts: list[int] = job.unit_context.tolist()
    return [
        np.concatenate((job.contexts[context], job.unit_tokens[start:end])).tolist()
        for context, start, end in zip(contexts, starts[:-1], starts[1:], strict=True)
    ]


def judged(item: str) -> list[dict[str, Any]]:
    return [{**each, "content": each["content"].replace(MARKER, item)} for each in JUDGE]


@pytest.mark.parametrize("name", SPECIALS)
async def test_items_in_a_message_are_read_as_transformers_writes_the_whole_chat(
    tmp_path: Path, name: str
) -> None:
    chat = chat_request(JUDGE, chat_template_kwargs=THINKING)
    options = inference_pb2.ScoreRequest(chat=chat, item_marker=MARKER)
    async with chatting(tmp_path, name) as served:
        await served.client.score(ITEMS, LABELS, options=options)
        found = sequences(served)
    for item, read in zip(ITEMS, found, strict=True):
        _, whole = expected_ids(
            tmp_path, judged(item), add_generation_prompt=True, enable_thinking=False
        )
        assert read == whole


@pytest.mark.parametrize("name", SPECIALS)
async def test_items_continue_a_chat_as_answers_do(tmp_path: Path, name: str) -> None:
    chat = chat_request(JUDGE, chat_template_kwargs=THINKING)
    options = inference_pb2.ScoreRequest(chat=chat)
    async with chatting(tmp_path, name) as served:
        scores = await served.client.score(ITEMS, LIKELIHOOD, options=options)
        job = served.engine.jobs[-1]
        assert isinstance(job, ScoreJob)
    _, before = expected_ids(tmp_path, JUDGE, add_generation_prompt=True, enable_thinking=False)
    assert [context.tolist() for context in job.contexts] == [before]
    assert np.isfinite(scores.scores).all()


async def test_the_likelihood_of_an_item_in_a_message_is_its_own(tmp_path: Path) -> None:
    options = inference_pb2.ScoreRequest(chat=chat_request(JUDGE), item_marker=MARKER)
    async with chatting(tmp_path) as served:
        in_chat = await served.client.score(ITEMS, LIKELIHOOD, options=options)
        before = served.engine.jobs[-1]
        assert isinstance(before, ScoreJob)
        tokenizer = load_tokenizer(tmp_path)
        packed = tokenizer.encode_continuations(ITEMS)
        context = inference_pb2.Context(tokens=before.contexts[0].astype("<u4").tobytes())
        items = [packed[index] for index in range(len(packed))]
        alone = await served.client.score_tokens(items, LIKELIHOOD, contexts=[context])
    assert in_chat.scores.tolist() == alone.scores.tolist()


@pytest.mark.parametrize("marker", ["", MARKER])
@pytest.mark.parametrize("name", SPECIALS)
async def test_special_tokens_in_items_stay_text(tmp_path: Path, name: str, marker: str) -> None:
    special, plain = SPECIALS[name][-1], "x"
    options = inference_pb2.ScoreRequest(chat=chat_request(JUDGE), item_marker=marker)
    async with chatting(tmp_path, name) as served:
        await served.client.score([special + "a", plain], LABELS, options=options)
        attacked, honest = sequences(served)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encoders is not None
    front = tokenizer.encoders.front
    special_id = front.get_vocab(with_added_tokens=True)[special]
    assert attacked.count(special_id) == honest.count(special_id)
    assert special + "a" in tokenizer.decode(attacked)


async def test_a_marker_may_look_like_a_part_of_a_special_token(tmp_path: Path) -> None:
    marker = "<|im_"
    messages = [{"role": "user", "content": f"Judge: {marker}"}]
    options = inference_pb2.ScoreRequest(chat=chat_request(messages), item_marker=marker)
    async with chatting(tmp_path) as served:
        await served.client.score(["end|>"], LABELS, options=options)
        (read,) = sequences(served)
    _, whole = expected_ids(
        tmp_path, [{"role": "user", "content": "Judge: end|>"}], add_generation_prompt=True
    )
    assert read == whole


def score_request(**fields: Any) -> inference_pb2.ScoreRequest:
    return inference_pb2.ScoreRequest(items=["a"], label_probabilities=LABELS, **fields)


CHAT = chat_request(JUDGE)
REFUSED: dict[str, tuple[inference_pb2.ScoreRequest, str]] = {
    "a query too": (score_request(chat=CHAT, query="q"), "query: cannot be given together"),
    "contexts too": (
        score_request(chat=CHAT, contexts=[inference_pb2.Context(text="a")]),
        "contexts: cannot be given together",
    ),
    "no chat": (score_request(item_marker=MARKER), "item_marker: needs a chat"),
    "no such text": (score_request(chat=CHAT, item_marker="{x}"), "stands 0 times"),
    "more than one": (score_request(chat=CHAT, item_marker="e"), "stands 5 times"),
    "a message that goes on": (
        score_request(chat=chat_request(JUDGE, continue_final_message=True), item_marker=MARKER),
        "together with continue_final_message",
    ),
    "no messages": (score_request(chat=inference_pb2.Chat()), "chat.messages: there are none"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_chat_that_cannot_be_scored_is_refused(tmp_path: Path, case: str) -> None:
    request, problem = REFUSED[case]
    async with chatting(tmp_path) as served:
        with pytest.raises(ClientError, match=problem):
            await served.client.score_request(request)


async def test_a_template_that_shows_a_message_twice_or_never_is_told(tmp_path: Path) -> None:
    options = inference_pb2.ScoreRequest(chat=CHAT, item_marker=MARKER)
    for times in (0, 2):
        folder = tmp_path / str(times)
        folder.mkdir()
        async with chatting(folder, source="-{{ messages[0].content }}" * times) as served:
            with pytest.raises(ClientError, match=f"item_marker: .* shows that message {times}"):
                await served.client.score(ITEMS, LABELS, options=options)


async def test_a_model_without_a_template_refuses() -> None:
    options = inference_pb2.ScoreRequest(chat=CHAT)
    async with serving(BigramEngine(random_bigrams(VOCABULARY))) as served:
        with pytest.raises(ClientError, match="chat: this model has no chat template"):
            await served.client.score(ITEMS, LABELS, options=options)
