"""Tokenizers with chat templates, as folders, and what transformers makes of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tests.service.serving import byte_encoder
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Encoder

TEMPLATES = Path(__file__).with_name("chat_templates")
SPECIALS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "headers": ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "instructions": ("<s>", "</s>", "[INST]", "[/INST]"),
    "thinking_tools": ("<|im_start|>", "<|im_end|>"),
}
NAMED: Mapping[str, Mapping[str, Any]] = {
    "chatml": {"eos_token": "<|im_end|>"},
    "headers": {"bos_token": "<|begin|>", "eos_token": "<|eot_id|>"},
    "instructions": {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}},
    "thinking_tools": {"eos_token": "<|im_end|>"},
}
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def piece_encoder() -> Encoder:
    """As SentencePiece vocabularies are: only the front of a text gets a space put before it."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"aehilno", "▁h", "▁hi"]
    merges = [("▁", "h"), ("▁h", "i")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    encoder = Encoder(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return encoder


def chat_folder(folder: Path, name: str, source: str | None = None) -> Path:
    encoder = piece_encoder() if name == "instructions" else byte_encoder()
    encoder.add_tokens(  # pyright: ignore[reportUnknownMemberType]
        [AddedToken(text, special=True, normalized=False) for text in SPECIALS[name]]
        + [AddedToken(text, special=False, normalized=False) for text in NOT_SPECIAL]
    )
    encoder.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED[name]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = (TEMPLATES / f"{name}.jinja").read_text() if source is None else source
    (folder / "chat_template.jinja").write_text(text)
    return folder


def expected_ids(
    folder: Path, messages: Sequence[Mapping[str, Any]], **options: Any
) -> tuple[str, list[int]]:
    """Text and ids by transformers."""
    fast: Any = transformers.PreTrainedTokenizerFast
    library = fast.from_pretrained(folder)
    text = library.apply_chat_template(messages, tokenize=False, **options)
    return text, library(text, add_special_tokens=False)["input_ids"]
