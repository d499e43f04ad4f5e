"""Chats of the default model, served over sockets."""

import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.oracle import Oracle
from tests.reference_models import default_reference

from stemserve.proto.v1 import inference_pb2, prefixes_pb2
from stemserve.service.client import Client, GenerateStep, chat_request
from stemserve.service.text.tokenizer_files import load_tokenizer

StartServer = Callable[..., tuple["subprocess.Popen[str]", dict[str, int]]]
SYSTEM = "<|im_start|>system\nYou answer in one short sentence.<|im_end|>\n"
MESSAGES = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of Italy?"},
]
WRITTEN = f"{SYSTEM}<|im_start|>user\n{MESSAGES[1]['content']}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
async def client(start_server: StartServer, default_model_path: Path) -> AsyncIterator[Client]:
    _, ports = start_server("--model", default_model_path, "--kv-pages", 200)
    async with Client(f"127.0.0.1:{ports['rpc']}", timeout_s=120.0) as client:
        yield client


async def test_a_chat_is_answered_as_transformers_answers_it_and_finds_its_registered_start(
    client: Client, default_model_path: Path
) -> None:
    tokenizer = load_tokenizer(default_model_path)
    prompt = tokenizer.encode_continuations([WRITTEN])[0].tolist()
    start = len(tokenizer.encode_continuations([SYSTEM])[0])
    await client.register(prefixes_pb2.RegisterRequest(text=SYSTEM, warm=True))
    expected = Oracle(default_reference(default_model_path)).greedy(prompt, 8)
    assert expected is not None, "this text is a matter of rounding"
    options = inference_pb2.GenerateRequest(
        sampling=inference_pb2.SamplingParams(temperature=0.0), max_new_tokens=8, n=2
    )
    steps: list[GenerateStep] = [step async for step in client.chat(MESSAGES, options=options)]
    ended = [*expected, 2].index(2) + 1  # the end of its turn
    for sample in range(2):
        news = [part for step in steps for part in step.news if part.sample == sample]
        found = [token for part in news for token in part.token_ids]
        assert found == expected[:ended]
        assert "".join(part.text for part in news) == tokenizer.decode(found)
    usage = steps[-1].usage
    assert usage is not None
    assert usage.cached_tokens == start


async def test_items_in_a_message_are_judged_as_in_the_text_that_the_template_writes(
    client: Client,
) -> None:
    question = "Is this an animal? Answer yes or no.\n{item}"
    messages = [MESSAGES[0], {"role": "user", "content": question}]
    items = ["The horse", "A table", "Whales"]
    mode = inference_pb2.LabelProbabilities(labels=["Yes", "No"])
    chat = inference_pb2.ScoreRequest(chat=chat_request(messages), item_marker="{item}")
    found = await client.score(items, mode, options=chat)
    before = f"{SYSTEM}<|im_start|>user\n{question.removesuffix('{item}')}"
    as_text = await client.score(
        items,
        mode,
        query="<|im_end|>\n<|im_start|>assistant\n",
        contexts=[inference_pb2.Context(text=before)],
        options=inference_pb2.ScoreRequest(item_first=True),
    )
    assert np.abs(found.scores - as_text.scores).max() < 1e-4
    assert found.label_mass.min() > 0.2
