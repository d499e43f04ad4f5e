"""Make one message of the new tokens that a step brought to the samples of a Generate call."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from stemserve.proto.v1 import inference_pb2
from stemserve.service.calls.score_answer import usage_message
from stemserve.service.request import GenerateChunk, SampleToken
from stemserve.service.text.sample_text import SampleText


class GenerateAnswer:
    """The state of all samples of one call."""

    def __init__(
        self, request: inference_pb2.GenerateRequest, token_bytes: Sequence[bytes], samples: int
    ) -> None:
        self._request = request
        self._samples = [
            SampleText(token_bytes, request.stop, min_new_tokens=request.min_new_tokens)
            for _ in range(samples)
        ]
        self.output_tokens = 0

    def add(
        self, chunk: GenerateChunk
    ) -> tuple[inference_pb2.GenerateResponse | None, tuple[int, ...]]:
        """The message, if there is news, and the samples that a stop string ended just now."""
        message = inference_pb2.GenerateResponse(
            request_id=self._request.request_id, token_offsets=[0]
        )
        stopped = list[int]()
        tokens = sorted(chunk.tokens, key=lambda token: token.sample)
        for sample, news in groupby(tokens, key=lambda token: token.sample):
            if not self._samples[sample].finish:
                self._add_sample(message, sample, list(news))
                if self._samples[sample].stopped_by_text:
                    stopped.append(sample)
        if chunk.usage is not None:
            usage = replace(chunk.usage, output_tokens=self.output_tokens)
            message.usage.CopyFrom(usage_message(usage))
        news_to_send = message.sample_index or chunk.usage is not None
        return (message if news_to_send else None), tuple(stopped)

    def _add_sample(
        self, message: inference_pb2.GenerateResponse, sample: int, news: Sequence[SampleToken]
    ) -> None:
        state, text = self._samples[sample], ""
        for token in news:
            text += state.feed(token)
            message.token_ids.append(token.token_id)
            self._add_logprobs(message, token)
            self.output_tokens += 1
            if state.finish:
                break
        message.sample_index.append(sample)
        message.text.append(text)
        message.finish_reason.append(state.finish)
        message.token_offsets.append(len(message.token_ids))

    def _add_logprobs(self, message: inference_pb2.GenerateResponse, token: SampleToken) -> None:
        if self._request.logprobs or self._request.top_logprobs:
            message.logprobs.append(token.logprob)
        if self._request.top_logprobs:
            pairs = zip(token.top_ids, token.top_logprobs, strict=True)
            message.top_logprobs.append(
                inference_pb2.TopLogprobs(
                    tokens=[
                        inference_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
                        for token_id, logprob in pairs
                    ]
                )
            )
