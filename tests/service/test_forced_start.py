"""Outputs whose start leaves a model no choice: for a while they are followed, for long refused."""

import json

import pytest
from tests.service.serving import BYTE_VOCABULARY, byte_tokenizer

from stemserve.service.constraints.forced_start import MOST_BYTES
from stemserve.service.constraints.grammar import Source, Vocabulary, compile_source
from stemserve.service.errors import InvalidRequest

LONG = {
    "repetition": Source("regex", "(a{999}){999}"),
    "one more than may be": Source("regex", f"a{{{MOST_BYTES + 1}}}"),
    "length": Source(
        "json_schema", json.dumps({"type": "string", "minLength": 10**6, "pattern": "^a+$"})
    ),
    "terminal": Source("grammar", "start: A\nA: /(a{999}){999}/"),
    "behind a token": Source("grammar", "start: <[256]> /(a{999}){999}/"),
    "text": Source("choice", json.dumps(["a" * (MOST_BYTES + 1)])),
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(byte_tokenizer(), BYTE_VOCABULARY + 14)


@pytest.mark.parametrize("name", LONG)
def test_a_start_that_leaves_no_choice_for_long_is_refused(
    vocabulary: Vocabulary, name: str
) -> None:
    source = LONG[name]
    with pytest.raises(InvalidRequest, match=f"begins with more than {MOST_BYTES} bytes") as found:
        compile_source(source, vocabulary)
    assert found.value.field == source.kind


@pytest.mark.parametrize("begin", ["", "b|", "[bc]"])
def test_what_leaves_no_choice_for_a_while_is_followed(vocabulary: Vocabulary, begin: str) -> None:
    state = compile_source(Source("regex", f"{begin}a{{200}}(b|c)"), vocabulary).start()
    text = b""
    while not state.is_complete:
        token = int(state.allowed().ids[0])
        state.advance(token)
        text += vocabulary.texts[token]
    assert text == (b"b" if begin == "[bc]" else b"") + b"a" * 200 + b"b"


def test_what_may_end_at_once_is_not_forced(vocabulary: Vocabulary) -> None:
    state = compile_source(Source("regex", "((a{9999}){9999})?"), vocabulary).start()
    assert state.is_complete
