"""All messages of a Generate stream as the one message that says the same."""

from dataclasses import dataclass, field

from stemserve.proto.v1 import inference_pb2


@dataclass(slots=True)
class _Sample:
    text: str = ""
    beam_scores: list[float] = field(default_factory=list[float])  # one, or none
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: inference_pb2.FinishReason.ValueType = inference_pb2.FINISH_REASON_UNSPECIFIED
    logprobs: list[float] = field(default_factory=list[float])
    asked_logprobs: list[float] = field(default_factory=list[float])
    top_logprobs: list[inference_pb2.TopLogprobs] = field(
        default_factory=list[inference_pb2.TopLogprobs]
    )


class JoinedSamples:
    """One row a sample, in order of the samples."""

    def __init__(self, count: int) -> None:
        self._samples = [_Sample() for _ in range(count)]
        self._last = inference_pb2.GenerateResponse()

    @property
    def count(self) -> int:
        return len(self._samples)

    def text(self, sample: int) -> str:
        return self._samples[sample].text

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        self._last = message
        for row, index in enumerate(message.sample_index):
            sample = self._samples[index]
            start, stop = message.token_offsets[row : row + 2]
            sample.text += message.text[row]
            sample.token_ids += message.token_ids[start:stop]
            sample.finish_reason = message.finish_reason[row]
            sample.beam_scores += message.beam_scores[row : row + 1]
            sample.logprobs += message.logprobs[start:stop]
            sample.top_logprobs += message.top_logprobs[start:stop]
            asked = len(message.asked_logprobs) // max(1, len(message.token_ids))
            sample.asked_logprobs += message.asked_logprobs[start * asked : stop * asked]

    def message(self) -> inference_pb2.GenerateResponse:
        joined = inference_pb2.GenerateResponse(request_id=self._last.request_id, token_offsets=[0])
        for index, sample in enumerate(self._samples):
            joined.sample_index.append(index)
            joined.text.append(sample.text)
            joined.token_ids.extend(sample.token_ids)
            joined.token_offsets.append(len(joined.token_ids))
            joined.finish_reason.append(sample.finish_reason)
            joined.beam_scores.extend(sample.beam_scores)
            joined.logprobs.extend(sample.logprobs)
            joined.top_logprobs.extend(sample.top_logprobs)
            joined.asked_logprobs.extend(sample.asked_logprobs)
        joined.prompt_logprobs.extend(self._last.prompt_logprobs)
        if self._last.HasField("usage"):
            joined.usage.CopyFrom(self._last.usage)
        if self._last.HasField("timing"):
            joined.timing.CopyFrom(self._last.timing)
        return joined
