"""Streamed text against one decoding of all bytes."""

import random

import pytest
from tests.service.serving import byte_encoder

from stemserve.service.text.detokenizer import Detokenizer
from stemserve.service.text.token_bytes import token_bytes


def pieces(tokens: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(tokens)
    return [*(detokenizer.feed([index]) for index in range(len(tokens))), detokenizer.flush()]


def test_b43_half_a_character_waits_for_its_other_half() -> None:
    assert pieces([b"\xf0\x9f", b"\x99\x82", b" ok"]) == ["", "🙂", " ok", ""]


def test_b43_a_cut_after_half_a_character_ends_in_one_replacement_character() -> None:
    assert pieces([b"a", b"\xf0\x9f"]) == ["a", "", "\ufffd"]


def test_b43_half_a_character_before_plain_text_is_replaced_once() -> None:
    tokens = ["A 世".encode(), b"\xe7\x95", b"ab"]
    assert "".join(pieces(tokens)) == b"".join(tokens).decode(errors="replace") == "A 世\ufffdab"


def test_b43_a_character_that_the_prompt_began_is_not_completed() -> None:
    assert pieces([b"\xad", b"x"]) == ["\ufffd", "x", ""]


def test_an_id_beyond_the_vocabulary_has_no_text() -> None:
    assert Detokenizer([b"a"]).feed([7]) == ""


@pytest.mark.parametrize("seed", range(20))
def test_b43_the_pieces_of_random_bytes_join_to_the_full_decoding(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(chr(rng.choice([0x41, 0xE9, 0x4E16, 0x1F642])) for _ in range(20)).encode()
    noise = bytes(rng.randrange(256) for _ in range(20))
    data = b"".join(rng.sample([text[:30], noise, text[30:]], 3))
    cuts = sorted(rng.sample(range(len(data)), 15))
    tokens = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    assert "".join(pieces(tokens)) == data.decode(errors="replace")


@pytest.mark.parametrize("seed", range(20))
def test_b43_the_pieces_join_to_what_the_tokenizers_library_decodes(seed: int) -> None:
    rng = random.Random(seed)
    encoder = byte_encoder()
    ids = [rng.randrange(258) for _ in range(60)]
    detokenizer = Detokenizer(token_bytes(encoder))
    cuts = sorted(rng.sample(range(61), 12))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, 60], strict=True)]
    joined = "".join([*map(detokenizer.feed, parts), detokenizer.flush()])
    assert joined == encoder.decode(ids, skip_special_tokens=True)
