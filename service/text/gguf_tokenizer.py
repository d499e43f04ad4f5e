"""Rebuild a byte-level BPE tokenizer from the metadata of a GGUF file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer

from stemserve.service.text import tokenizer as stem
from stemserve.service.text.chat_template import (
    DEFAULT,
    WITH_TOOLS,
    ChatTemplate,
    chat_template,
)
from stemserve.service.text.gguf_metadata import Value, read_gguf_metadata
from stemserve.service.text.token_bytes import token_bytes

CONTROL = 3  # tokenizer.ggml.token_type
USER_DEFINED = 4

LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
TEMPLATE_KEY = "tokenizer.chat_template"
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a value of tokenizer.ggml.pre stands for."""

    pre_tokenizer: PreTokenizer
    normalize: bool = False  # to NFC
    ignore_merges: bool = False
    adds_bos: bool = False  # where the file does not say


def _split(digits: str) -> PreTokenizer:
    pattern = Regex(f"{LETTERS}|{digits}|{PUNCTUATION_AND_SPACE}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _single_digits() -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def _recipe(name: str) -> Recipe:
    match name:
        case "smollm":
            return Recipe(pre_tokenizer=_single_digits())
        case "qwen2":
            return Recipe(pre_tokenizer=_split(r"\p{N}"), normalize=True)
        case "llama-bpe":
            return Recipe(pre_tokenizer=_split(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
        case "gpt-2":
            return Recipe(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False))
        case _:
            raise ValueError(f"unknown GGUF pre-tokenizer {name!r}")


def load_gguf_tokenizer(path: Path) -> stem.Tokenizer:
    metadata = read_gguf_metadata(path)
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ValueError(f"{path} has a {model!r} tokenizer; only byte-level BPE (gpt2) is rebuilt")
    recipe = _recipe(str(metadata.get("tokenizer.ggml.pre")))
    encoder = _encoder(metadata, recipe)
    return stem.Tokenizer(
        encoders=stem.Encoders(front=encoder, continuation=encoder),
        token_bytes=token_bytes(encoder),
        bos_id=_added_bos(metadata, recipe),
        eos_ids=frozenset(value for key in END_KEYS if isinstance(value := metadata.get(key), int)),
        chat_template=_chat_template(metadata),
    )


def _added_bos(metadata: Mapping[str, Value], recipe: Recipe) -> int | None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    adds = metadata.get("tokenizer.ggml.add_bos_token", recipe.adds_bos)
    return bos if adds and isinstance(bos, int) else None


def _chat_template(metadata: Mapping[str, Value]) -> ChatTemplate | None:
    found = metadata.get(TEMPLATE_KEY)
    named = [{"name": DEFAULT, "template": found}]
    named.append({"name": WITH_TOOLS, "template": metadata.get(f"{TEMPLATE_KEY}.{WITH_TOOLS}")})
    texts = _strings(metadata, "tokenizer.ggml.tokens")
    tokens = dict[str, str]()
    for name, key in NAMED_TOKENS.items():
        token_id = metadata.get(key)
        if isinstance(token_id, int) and 0 <= token_id < len(texts):
            tokens[name] = texts[token_id]
    return chat_template(named, tokens)


def _encoder(metadata: Mapping[str, Value], recipe: Recipe) -> Tokenizer:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    merges = [
        (left, right)
        for left, _, right in (
            m.partition(" ") for m in _strings(metadata, "tokenizer.ggml.merges")
        )
    ]
    encoder = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=recipe.ignore_merges,
        )
    )
    if recipe.normalize:
        encoder.normalizer = normalizers.NFC()
    encoder.pre_tokenizer = recipe.pre_tokenizer
    encoder.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError("tokenizer.ggml.token_type does not name a type for each token")
    encoder.add_tokens(  # pyright: ignore[reportUnknownMemberType]
        [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return encoder


def _strings(metadata: Mapping[str, Value], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list):
        raise ValueError(f"the file has no {key}")
    return [str(value) for value in values]
