"""Generate through a real socket, with tokens of a script or of a bigram model."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing

import grpc
import numpy as np
import pytest
from tests.service.bigram_engine import THREE_TOKENS, BigramEngine, random_bigrams
from tests.service.generating import GREEDY, generated, prompt
from tests.service.serving import fixed_tokens, serving
from tests.service.waiting import until

from stemserve.proto.v1 import inference_pb2
from stemserve.service.client import ClientError, SampleNews
from stemserve.service.text.tokenizer import Tokenizer

EOS = 4


def scripted(*samples: Sequence[int], vocab_size: int = 5) -> BigramEngine:
    return BigramEngine(random_bigrams(vocab_size), script=samples)


async def one_sample(
    engine: BigramEngine, tokenizer: Tokenizer, request: inference_pb2.GenerateRequest
) -> list[SampleNews]:
    async with serving(engine, tokenizer) as served:
        return (await generated(served, request))[1][0]


def stop_request(*stops: str, new_tokens: int = 3) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt=prompt(0), stop=stops, max_new_tokens=new_tokens)


TEXTS = (b"ab", b"E", b"ND cd", b"X", b"")


@pytest.mark.parametrize(
    ("script", "expected", "finish"),
    [
        ((0, 1, 2), ["ab", "", ""], "stop"),
        ((0, 1, 3, EOS), ["ab", "", "EX", ""], "stop"),
        ((0, 1, EOS), ["ab", "", "E"], "stop"),
    ],
)
async def test_b42_a_stop_string_that_spans_tokens_is_never_shown_and_held_text_is_not_lost(
    script: tuple[int, ...], expected: list[str], finish: str
) -> None:
    tokenizer = fixed_tokens(*TEXTS, eos_id=EOS)
    news = await one_sample(scripted(script), tokenizer, stop_request("END", new_tokens=9))
    assert [part.text for part in news] == expected
    assert news[-1].finish == finish
    assert [part.finish for part in news[:-1]] == [""] * (len(news) - 1)


async def test_b42_the_first_complete_match_wins() -> None:
    news = await one_sample(scripted((0, 1, 2)), fixed_tokens(*TEXTS), stop_request("b", "ab"))
    assert [part.text for part in news] == [""]


async def test_b42_a_stop_string_counts_only_from_the_minimum_on() -> None:
    request = stop_request("ab", new_tokens=4)
    request.min_new_tokens = 3
    news = await one_sample(scripted((0, 0, 0, 0)), fixed_tokens(*TEXTS), request)
    assert [part.text for part in news] == ["ab", "ab", ""]
    assert news[-1].finish == "stop"


async def test_a_stop_string_ends_only_its_own_sample() -> None:
    async with serving(scripted((0, 1, 2, 3), (3, 3, 3, 3)), fixed_tokens(*TEXTS)) as served:
        request = stop_request("END", new_tokens=4)
        request.n = 2
        steps, samples = await generated(served, request)
        assert "".join(news.text for news in samples[0]) == "ab"
        assert "".join(news.text for news in samples[1]) == "XXXX"
        assert [news.finish for news in samples[1]] == ["", "", "", "length"]
        assert {sample for _, sample in served.engine.stopped} == {0}
        usage = steps[-1].usage
        assert usage is not None and usage.output_tokens == 3 + 4


async def test_b43_half_characters_wait_and_a_cut_ends_in_one_replacement_character() -> None:
    tokenizer = fixed_tokens(b"\xf0\x9f", b"\x99\x82", b" ok", b"", b"")
    whole = await one_sample(scripted((0, 1, 2)), tokenizer, stop_request())
    cut = await one_sample(scripted((2, 0)), tokenizer, stop_request(new_tokens=2))
    assert [news.text for news in whole] == ["", "🙂", " ok"]
    assert [news.text for news in cut] == [" ok", "\ufffd"]


@pytest.mark.parametrize("seed", range(5))
async def test_b43_the_streamed_texts_join_to_the_decoding_of_all_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = [bytes(rng.integers(0, 256, rng.integers(1, 4)).tolist()) for _ in range(40)]
    tokenizer = fixed_tokens(*tokens)
    scripts = [rng.integers(0, 40, 30).tolist() for _ in range(3)]
    async with serving(scripted(*scripts, vocab_size=40), tokenizer) as served:
        request = stop_request(new_tokens=30)
        request.n = 3
        _, samples = await generated(served, request)
        for sample, script in enumerate(scripts):
            joined = "".join(news.text for news in samples[sample])
            assert joined == tokenizer.decode(script)
            assert [token for news in samples[sample] for token in news.token_ids] == script


async def test_one_message_a_step_carries_the_news_of_all_samples() -> None:
    async with serving(scripted((0, 1, 2), (3, 3, 3)), fixed_tokens(*TEXTS)) as served:
        request = stop_request()
        request.n = 2
        steps, _ = await generated(served, request)
        assert [[news.sample for news in step.news] for step in steps] == [[0, 1]] * 3 + [[]]
        assert [step.usage is not None for step in steps] == [False] * 3 + [True]
        assert steps[-1].timing is not None and steps[-1].timing.total_seconds > 0


async def test_b36_an_early_end_of_one_sample_leaves_the_others_running() -> None:
    tokenizer = fixed_tokens(*TEXTS, eos_id=EOS)
    scripts = [(0, EOS), (1, 1, 1, 1), (2, 2, 2, EOS), (3, 3, 3, 3)]
    async with serving(scripted(*scripts), tokenizer) as served:
        request = stop_request(new_tokens=4)
        request.n = 4
        _, samples = await generated(served, request)
        finishes = [[news.finish for news in samples[sample] if news.finish] for sample in range(4)]
        assert finishes == [["stop"], ["length"], ["stop"], ["length"]]


async def test_ignore_eos_goes_on_past_it() -> None:
    tokenizer = fixed_tokens(*TEXTS, eos_id=EOS)
    request = stop_request()
    request.ignore_eos = True
    news = await one_sample(scripted((0, EOS, 1)), tokenizer, request)
    assert [part.finish for part in news] == ["", "", "length"]


async def test_b37_logprobs_are_raw_and_the_top_ones_come_first() -> None:
    request = inference_pb2.GenerateRequest(
        prompt=prompt(0), sampling=GREEDY, max_new_tokens=2, logprobs=True, top_logprobs=2
    )
    request.sampling.logit_bias[2] = 1.0
    news = await one_sample(BigramEngine(), fixed_tokens(b"a", b"b", b"c"), request)
    assert news[0].logprobs == pytest.approx([math.log(0.7)])
    (top,) = news[0].top_logprobs
    assert [token for token, _ in top] == [0, 1]
    assert [value for _, value in top] == pytest.approx([math.log(0.7), math.log(0.2)])


async def test_no_logprobs_come_unasked() -> None:
    news = await one_sample(scripted((0, 0, 0)), fixed_tokens(*TEXTS), stop_request())
    assert news[0].logprobs == () and news[0].top_logprobs == ()


@pytest.mark.parametrize(
    ("length", "asked", "given"), [(63, 1, 1), (60, 10, 4), (60, 4, 4), (64, 1, None)]
)
async def test_b34_the_new_tokens_are_cut_to_the_models_context(
    length: int, asked: int, given: int | None
) -> None:
    async with serving(BigramEngine(), fixed_tokens(b"a", b"b", b"c")) as served:
        request = inference_pb2.GenerateRequest(
            prompt=prompt(*[0] * length), sampling=GREEDY, max_new_tokens=asked
        )
        if given is None:
            with pytest.raises(ClientError, match="64 tokens"):
                await generated(served, request)
            return
        _, samples = await generated(served, request)
        assert len(samples[0]) == given
        assert samples[0][-1].finish == "length"


@pytest.mark.parametrize("chunks", [0, 1, 3])
async def test_b50_a_client_that_leaves_closes_the_engines_stream(chunks: int) -> None:
    engine = BigramEngine(THREE_TOKENS, context_tokens=100_000)
    async with serving(engine, fixed_tokens(b"a", b"b", b"c")) as served:
        if chunks == 0:
            engine.hold.clear()
        request = inference_pb2.GenerateRequest(prompt=prompt(0), max_new_tokens=90_000, n=4)
        async with aclosing(served.client.generate(request)) as steps:
            first = asyncio.create_task(anext(steps))
            await until(lambda: engine.running == 1)
            for _ in range(chunks):
                await first
                first = asyncio.create_task(anext(steps))
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await until(lambda: engine.running == 0)
        phase = "decode" if chunks else "prefill"
        await until(
            lambda: served.metric("requests_cancelled_total", phase=phase, cause="client") == 1
        )


async def test_b51_a_deadline_ends_a_stream() -> None:
    engine = BigramEngine(THREE_TOKENS, context_tokens=1_000_000)
    async with serving(engine, fixed_tokens(b"a", b"b", b"c")) as served:
        call = served.channel.unary_stream(
            "/stemserve.v1.Inference/Generate",
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        request = inference_pb2.GenerateRequest(prompt=prompt(0), max_new_tokens=900_000)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            async for _ in call(request, timeout=0.2):
                pass
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: engine.running == 0)
