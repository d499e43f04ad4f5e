"""Make one message of the new tokens that steps brought to the samples of a Generate call."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.scores.score_answer import usage_message
from stemserve.service.request import GenerateChunk, SampleTokens, TopTokens
from stemserve.service.text.sample_text import SampleText


def sample_texts(
    request: inference_pb2.GenerateRequest, token_bytes: Sequence[bytes], samples: int
) -> list[SampleText]:
    return [
        SampleText(token_bytes, request.stop, min_new_tokens=request.min_new_tokens)
        for _ in range(samples)
    ]


class GenerateAnswer:
    """The state of all samples of one call."""

    def __init__(
        self, request: inference_pb2.GenerateRequest, token_bytes: Sequence[bytes], samples: int
    ) -> None:
        self._request_id = request.request_id
        self._top_logprobs = request.top_logprobs
        self._asks = len(request.logprob_token_ids) > 0
        self._logprobs = request.logprobs or self._top_logprobs > 0
        self._is_search = request.HasField("beam_search")
        self._samples = sample_texts(request, token_bytes, samples)
        self.output_tokens = 0

    def add(self, chunk: GenerateChunk) -> inference_pb2.GenerateResponse | None:
        """The message, if there is news."""
        message = inference_pb2.GenerateResponse(request_id=self._request_id, token_offsets=(0,))
        for sample, news in _by_sample(chunk.news).items():
            if not self._samples[sample].finish:
                self._add_sample(message, sample, news)
        if chunk.usage is not None:
            usage = replace(chunk.usage, output_tokens=self.output_tokens)
            message.usage.CopyFrom(usage_message(usage))
        if chunk.prompt_logprobs is not None:
            message.prompt_logprobs.extend(chunk.prompt_logprobs.tolist())
        return message if message.sample_index or chunk.usage is not None else None

    def _add_sample(
        self, message: inference_pb2.GenerateResponse, sample: int, news: Sequence[SampleTokens]
    ) -> None:
        state, text = self._samples[sample], ""
        for tokens in news:
            new_text, count = state.feed(tokens)
            text += new_text
            self.output_tokens += count
            message.token_ids.extend(tokens.token_ids[:count])
            if self._logprobs:
                message.logprobs.extend(tokens.logprobs[:count])
            if self._top_logprobs:
                likeliest = (_top_logprobs(t, self._top_logprobs) for t in tokens.tops[:count])
                message.top_logprobs.extend(likeliest)
            if self._asks:
                for top in tokens.tops[:count]:
                    message.asked_logprobs.extend(top.logprobs[self._top_logprobs :])
            if state.finish:
                break
        message.sample_index.append(sample)
        message.text.append(text)
        message.finish_reason.append(state.finish)
        message.token_offsets.append(len(message.token_ids))
        if self._is_search:
            message.beam_scores.append(news[-1].score)


def _by_sample(news: Sequence[SampleTokens]) -> Mapping[int, Sequence[SampleTokens]]:
    """In the order of the samples; most calls have one."""
    if len(news) == 1:
        return {news[0].sample: news}
    apart: dict[int, list[SampleTokens]] = {}
    for tokens in news:
        apart.setdefault(tokens.sample, []).append(tokens)
    return dict(sorted(apart.items()))


def _top_logprobs(top: TopTokens, count: int) -> inference_pb2.TopLogprobs:
    return inference_pb2.TopLogprobs(
        tokens=[
            inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in zip(top.ids[:count], top.logprobs[:count], strict=True)
        ]
    )
