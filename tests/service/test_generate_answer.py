"""One message of many tokens against a message a token."""

import random
from collections import defaultdict

import pytest

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.generation.generate_answer import GenerateAnswer, sample_texts
from stemserve.service.calls.generation.stop_watch import StopWatch
from stemserve.service.request import GenerateChunk, SampleTokens, StopCause, TopTokens

SAMPLES, LENGTH = 3, 12
WORDS = [b"a", b"b", b" ", b"\xe4\xb8", b"\x96", b"\xff", b"\xf0\x9f\x99\x82", b""]

Told = dict[int, tuple[str, list[int], list[float], int]]


def drawn(rng: random.Random, finish: str) -> list[SampleTokens]:
    """Some tokens of each sample, the samples' tokens among each other's."""
    left = [LENGTH - 3 * sample for sample in range(SAMPLES)]
    tokens: list[SampleTokens] = []
    while any(left):
        sample = rng.choice([s for s in range(SAMPLES) if left[s]])
        left[sample] -= 1
        ends = None if left[sample] else finish
        top = TopTokens([rng.randrange(len(WORDS))], [0.5])
        tokens.append(SampleTokens(sample, [rng.randrange(9)], [rng.random()], [top], ends))
    return tokens


def in_bursts(tokens: list[SampleTokens]) -> list[SampleTokens]:
    """Sample by sample, four tokens at a time."""
    bursts: list[SampleTokens] = []
    for sample in range(SAMPLES):
        own = [token for token in tokens if token.sample == sample]
        for start in range(0, len(own), 4):
            part = own[start : start + 4]
            ids = [token.token_ids[0] for token in part]
            logprobs = [token.logprobs[0] for token in part]
            tops = [token.tops[0] for token in part]
            bursts.append(SampleTokens(sample, ids, logprobs, tops, part[-1].finish))
    return bursts


def told(
    request: inference_pb2.GenerateRequest, tokens: list[SampleTokens], at_once: int
) -> tuple[Told, set[int]]:
    answer = GenerateAnswer(request, WORDS, SAMPLES)
    stops = list[int]()
    watch = StopWatch(sample_texts(request, WORDS, SAMPLES), stop=stops.append)
    news: Told = defaultdict(lambda: ("", [], [], 0))
    for start in range(0, len(tokens), at_once):
        chunk = GenerateChunk(request_id="x", news=tokens[start : start + at_once])
        before = len(stops)
        assert watch.completes(chunk) == (len(stops) > before)
        message = answer.add(chunk)
        if message is None:
            continue
        assert list(message.sample_index) == sorted(message.sample_index)
        for row, sample in enumerate(message.sample_index):
            part = slice(message.token_offsets[row], message.token_offsets[row + 1])
            text, ids, tops, _ = news[sample]
            news[sample] = (
                text + message.text[row],
                [*ids, *message.token_ids[part]],
                [*tops, *(top.tokens[0].token_id for top in message.top_logprobs[part])],
                message.finish_reason[row],
            )
    assert answer.output_tokens == sum(len(ids) for _, ids, _, _ in news.values())
    assert len(set(stops)) == len(stops)
    return dict(news), set(stops)


@pytest.mark.parametrize("stops", [(), ("ab", "b 世")])
@pytest.mark.parametrize("finish", [StopCause.STOP_ID, StopCause.LENGTH])
@pytest.mark.parametrize("seed", range(20))
def test_many_tokens_in_one_message_say_what_a_message_a_token_says(
    seed: int, finish: str, stops: tuple[str, ...]
) -> None:
    rng = random.Random(seed)
    tokens = drawn(rng, finish)
    request = inference_pb2.GenerateRequest(stop=stops, top_logprobs=1)
    one_by_one = told(request, tokens, 1)
    assert told(request, tokens, rng.randrange(2, 12)) == one_by_one
    assert told(request, tokens, len(tokens)) == one_by_one
    bursts = in_bursts(tokens)
    assert told(request, bursts, rng.randrange(1, 4)) == one_by_one
    for sample, (text, ids, _, reason) in one_by_one[0].items():
        known = [WORDS[token] for token in ids if token < len(WORDS)]
        whole = b"".join(known[:-1] if finish == StopCause.STOP_ID and not stops else known)
        if sample in one_by_one[1]:
            assert not any(stop in text for stop in stops)
            assert reason == inference_pb2.FINISH_REASON_STOP
        elif not stops and (finish == StopCause.LENGTH or ids[-1] < len(WORDS)):
            assert text == whole.decode(errors="replace")
