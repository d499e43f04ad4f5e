"""Tokenizers of folders and of the default model's file, against the libraries they come from."""

import asyncio
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.service.serving import BOS_ID, BYTE_VOCABULARY, byte_encoder, byte_tokenizer
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, normalizers, processors

from stemserve.service.errors import QuotaExceeded
from stemserve.service.text.gguf_metadata import read_gguf_metadata
from stemserve.service.text.tokenizer import LONG_CHARACTERS, Tokenizer, TokenizerPool
from stemserve.service.text.tokenizer_files import load_tokenizer, no_tokenizer

TEXTS = [
    "Hello 123 world",
    " yes",
    "yes",
    "\n",
    "don't  stop 3.14 <|endoftext|> 世界🙂",
    "<|im_start|>user\nhi<|im_end|>",
    "\t\t  def f(x): return x\r\n",
    "é e\u0301  ",
    "",
]


@pytest.fixture(scope="module")
def default_tokenizer(default_model_path: Path) -> Tokenizer:
    return load_tokenizer(default_model_path)


def test_the_default_model_tokenizes_as_transformers_converts_it(
    default_tokenizer: Tokenizer, default_model_path: Path
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    converted = transformers.AutoTokenizer.from_pretrained(
        default_model_path.parent, gguf_file=default_model_path.name
    )
    packed = default_tokenizer.encode_continuations(TEXTS)
    for index, text in enumerate(TEXTS):
        expected = converted(text, add_special_tokens=False)["input_ids"]
        assert packed[index].tolist() == expected


def test_the_default_model_has_no_bos_and_ends_with_its_turn(default_tokenizer: Tokenizer) -> None:
    assert default_tokenizer.bos_id is None
    assert default_tokenizer.eos_ids == {2}
    assert default_tokenizer.vocab_size == 49_152
    assert default_tokenizer.chat_template is not None


@pytest.mark.parametrize("seed", range(5))
def test_decoding_equals_the_library_also_for_ids_that_are_no_text(
    default_tokenizer: Tokenizer, seed: int
) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(default_tokenizer.vocab_size) for _ in range(200)]
    assert default_tokenizer.encoders is not None
    library = default_tokenizer.encoders.front
    assert default_tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)


def test_a_text_survives_encoding_and_decoding(default_tokenizer: Tokenizer) -> None:
    text = "don't  stop 3.14  世界🙂\r\n"
    ids = default_tokenizer.encode_continuations([text]).tokens.tolist()
    assert default_tokenizer.decode(ids) == text


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        read_gguf_metadata(file)


def test_a_file_that_ends_within_its_metadata_is_refused(
    default_model_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    with default_model_path.open("rb") as whole:
        file.write_bytes(whole.read(5_000))
    with pytest.raises(ValueError, match="ends within its metadata"):
        read_gguf_metadata(file)


def write_folder(folder: Path, encoder: Encoder, **files: dict[str, Any]) -> Path:
    encoder.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def with_template(encoder: Encoder) -> Encoder:
    encoder.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    return encoder


def test_a_bos_that_the_tokenizer_adds_stands_at_the_front_only(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, with_template(byte_encoder())))
    assert tokenizer.bos_id == BOS_ID
    front = tokenizer.encode_front(["a", "<bos>a", ""])
    assert [part.tolist().count(BOS_ID) for part in front] == [1, 1, 1]
    assert all(part[0] == BOS_ID for part in front)
    assert BOS_ID not in tokenizer.encode_continuations(["a", "<bos>a", ""]).tokens


@pytest.mark.parametrize(("adds", "expected"), [(False, None), (True, BOS_ID)])
def test_the_config_decides_about_the_bos(tmp_path: Path, adds: bool, expected: int | None) -> None:
    encoder = byte_encoder() if adds else with_template(byte_encoder())
    config = {"add_bos_token": adds, "bos_token": {"content": "<bos>"}}
    folder = write_folder(tmp_path, encoder, tokenizer_config=config)
    assert load_tokenizer(folder).bos_id == expected


def test_every_end_token_that_a_folder_names_counts(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path,
        byte_encoder(),
        config={"eos_token_id": 3},
        generation_config={"eos_token_id": [4, 5]},
        tokenizer_config={"eos_token": "<eos>", "chat_template": "hi"},
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == {3, 4, 5, BYTE_VOCABULARY - 1}
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.sources == {"default": "hi"}
    assert tokenizer.chat_template.tokens == {"eos_token": "<eos>"}


def sentence_piece_encoder() -> Encoder:
    """Puts a space before a text, and writes what it does not know as bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "y", "e", "s", "▁yes"]
    merges = [("▁", "y"), ("▁y", "e"), ("▁ye", "s")]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, "▁y", "▁ye"])}
    encoder = Encoder(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    encoder.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return encoder


def test_only_the_front_of_a_sequence_gets_a_space_put_before_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, sentence_piece_encoder()))
    (front,) = tokenizer.encode_front(["yes"])
    continuations = tokenizer.encode_continuations(["yes", " yes"])
    assert tokenizer.decode(front.tolist()) == " yes"
    assert tokenizer.decode(continuations[0].tolist()) == "yes"
    assert continuations[1].tolist() == front.tolist()


def test_bytes_of_a_sentence_piece_vocabulary_are_characters_again(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, sentence_piece_encoder()))
    ids = tokenizer.encode_continuations([" 世🙂yes"]).tokens.tolist()
    assert len(ids) > 7
    assert tokenizer.decode(ids) == " 世🙂yes"


def test_a_tokenizer_whose_text_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    encoder = Encoder(models.WordLevel(vocab={"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match="cannot stream text"):
        load_tokenizer(write_folder(tmp_path, encoder))


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer.json", "{", "tokenizer.json is no tokenizer: "),
        ("tokenizer.json", '{"model": 1}', "tokenizer.json is no tokenizer: "),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json holds no JSON object"),
        ("generation_config.json", "end", "generation_config.json is not JSON: "),
        ("config.json", "null", "config.json holds no JSON object"),
        ("config.json", '{"eos_token_id": [1, "2"]}', "eos_token_id of .*: '2' is no token id"),
    ],
)
def test_a_file_of_something_else_is_named(
    tmp_path: Path, name: str, content: str, problem: str
) -> None:
    byte_encoder().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=problem):
        load_tokenizer(tmp_path)


def test_a_model_without_a_tokenizer_still_has_its_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert no_tokenizer(tmp_path).eos_ids == {7}


async def test_the_pool_encodes_as_the_tokenizer_does() -> None:
    tokenizer = byte_tokenizer(adds_bos=True)
    with ThreadPoolExecutor(2) as executor:
        pool = TokenizerPool(tokenizer, executor, long_executor=executor)
        packed = await pool.encode_continuations(["ab", "", "c"])
        assert packed.lengths.tolist() == [2, 0, 1]
        assert (await pool.encode_continuations(["", ""])).lengths.tolist() == [0, 0]
        (front,) = await pool.encode_front(["ab"])
        assert front.tolist() == tokenizer.encode_front(["ab"])[0].tolist()
        assert await pool.encode_front([]) == ()


@pytest.mark.parametrize("seed", range(5))
async def test_texts_that_come_again_get_the_ids_that_each_has(seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = byte_tokenizer(adds_bos=True)
    assert BOS_ID in byte_encoder().encode("a<bos>b").ids
    known = ["", "<bos>", "a<bos>b", "cd", "é"]
    texts = rng.choices(known, k=rng.randrange(1, 12))
    with ThreadPoolExecutor(1) as executor:
        pool = TokenizerPool(tokenizer, executor, long_executor=executor)
        packed = await pool.encode_continuations(texts)
    assert len(packed) == len(texts)
    for index, text in enumerate(texts):
        alone = tokenizer.encode_continuations([text]).tokens.tolist()
        assert packed[index].tolist() == alone
        assert BOS_ID not in alone


async def test_a_long_text_that_is_refused_is_not_tokenised() -> None:
    asked: list[int] = []

    async def refuse(least_tokens: int) -> None:
        asked.append(least_tokens)
        raise QuotaExceeded("over the rate", subject="tokens_per_second", retry_after_s=1.0)

    with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(1) as long_executor:
        pool = TokenizerPool(byte_tokenizer(), executor, long_executor=long_executor, admit=refuse)
        await pool.encode_continuations(["a" * LONG_CHARACTERS])
        assert not asked
        long_executor.shutdown()  # an encoding that took a thread would fail otherwise
        with pytest.raises(QuotaExceeded):
            await pool.encode_continuations(["é" * LONG_CHARACTERS, "b"])
    longest = max(map(len, byte_tokenizer().token_bytes))
    assert asked == [(LONG_CHARACTERS + 1) // longest]


async def test_short_texts_do_not_wait_for_long_ones() -> None:
    held = threading.Event()
    with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(1) as long_executor:
        pool = TokenizerPool(byte_tokenizer(), executor, long_executor=long_executor)
        long_executor.submit(held.wait)
        long = asyncio.create_task(pool.encode_continuations(["a" * (LONG_CHARACTERS + 1)]))
        await asyncio.sleep(0)
        try:
            assert (await pool.encode_continuations(["a" * LONG_CHARACTERS])).lengths.tolist() == [
                LONG_CHARACTERS
            ]
            assert not long.done()
        finally:
            held.set()
        assert (await long).lengths.tolist() == [LONG_CHARACTERS + 1]
