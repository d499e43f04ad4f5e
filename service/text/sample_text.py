"""The text of one sample as its tokens come: whole characters, ended before a stop string."""

from collections.abc import Sequence

from stemserve.proto.v1 import inference_pb2
from stemserve.service.request import SampleTokens, StopCause
from stemserve.service.text.detokenizer import Detokenizer
from stemserve.service.text.stop_strings import StopMatcher


class SampleText:
    """A stop string counts from the sample's token number `min_new_tokens` on; the token of a stop
    id has no text."""

    def __init__(
        self, token_bytes: Sequence[bytes], stops: Sequence[str], *, min_new_tokens: int
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._matcher = StopMatcher(stops)
        self._has_stops = bool(stops)
        self._min_new_tokens = min_new_tokens
        self._tokens = 0
        self.finish: inference_pb2.FinishReason.ValueType = inference_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def stopped_by_text(self) -> bool:
        return self._matcher.matched

    def feed(self, news: SampleTokens) -> tuple[str, int]:
        """The new text, and how many of the tokens it is of; sets `finish` at the sample's last."""
        ids, text = news.token_ids, ""
        if not ids and news.finish is not None:
            return self._end(news.finish), 0
        if not self._has_stops:
            return self._feed(ids, news.finish), len(ids)
        for number, token_id in enumerate(ids, start=1):
            text += self._feed_one(token_id, news.finish if number == len(ids) else None)
            if self.finish:
                return text, number
        return text, len(ids)

    def _end(self, finish: str) -> str:
        """Behind the tokens there were."""
        text = self._detokenizer.flush()
        if self._tokens >= self._min_new_tokens:
            text = self._matcher.feed(text)
        stopped = inference_pb2.FINISH_REASON_STOP
        self.finish = stopped if self._matcher.matched else _reason(finish)
        return text + self._matcher.flush()

    def _feed(self, ids: Sequence[int], finish: str | None) -> str:
        """Where only the engine ends a sample."""
        if finish is None:
            return self._detokenizer.feed(ids)
        by_id = finish == StopCause.STOP_ID
        self.finish = _reason(finish)
        return self._detokenizer.feed(ids[:-1] if by_id else ids) + self._detokenizer.flush()

    def _feed_one(self, token_id: int, finish: str | None) -> str:
        self._tokens += 1
        by_id = finish == StopCause.STOP_ID
        text = "" if by_id else self._detokenizer.feed([token_id])
        if finish is not None:
            text += self._detokenizer.flush()
        if self._tokens >= self._min_new_tokens:
            text = self._matcher.feed(text)
        if self._matcher.matched or by_id:
            self.finish = inference_pb2.FINISH_REASON_STOP
        elif finish is not None:
            self.finish = _reason(finish)
        return text + self._matcher.flush() if self.finish else text


def _reason(finish: str) -> inference_pb2.FinishReason.ValueType:
    if finish == StopCause.LENGTH:
        return inference_pb2.FINISH_REASON_LENGTH
    if finish == StopCause.NONE_LEFT:
        return inference_pb2.FINISH_REASON_NONE_LEFT
    return inference_pb2.FINISH_REASON_STOP
