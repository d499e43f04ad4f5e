"""The text of a sample, where its end comes apart from its last token."""

import pytest
from tests.service.serving import BYTE_VOCABULARY, byte_tokenizer

from stemserve.proto.v1 import inference_pb2
from stemserve.service.request import SampleTokens, StopCause
from stemserve.service.text.sample_text import SampleText

TOKENS = byte_tokenizer().token_bytes


def news(text: bytes, finish: str | None = None) -> SampleTokens:
    ids = [TOKENS.index(bytes([byte])) for byte in text]
    return SampleTokens(0, ids, [-1.0] * len(ids), finish=finish)


@pytest.mark.parametrize("stops", [[], ["x"], ["bcd"]])
@pytest.mark.parametrize("text", [b"abc", "é".encode(), "aé".encode()[:-1]])
def test_an_end_behind_the_last_token_gives_the_text_that_it_gives_with_it(
    stops: list[str], text: bytes
) -> None:
    assert len(TOKENS) >= BYTE_VOCABULARY
    whole, apart = (SampleText(TOKENS, stops, min_new_tokens=0) for _ in range(2))
    shown, count = whole.feed(news(text, StopCause.COMPLETE))
    first, _ = apart.feed(news(text))
    rest, none = apart.feed(news(b"", StopCause.COMPLETE))
    assert (first + rest, none) == (shown, 0)
    assert count == len(text)
    assert whole.finish == apart.finish == inference_pb2.FINISH_REASON_STOP
