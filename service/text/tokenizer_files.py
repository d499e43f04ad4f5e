"""Load a model's tokenizer from a Hugging Face folder or a GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import tokenizers

from stemserve.service.text.chat_template import ChatTemplate, chat_template, named_tokens
from stemserve.service.text.gguf_tokenizer import load_gguf_tokenizer
from stemserve.service.text.token_bytes import token_bytes
from stemserve.service.text.tokenizer import Encoders, Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises FileNotFoundError or ValueError, with the reason, where there is none to load."""
    if path.is_file():
        return load_gguf_tokenizer(path)
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} holds no tokenizer.json")
    front = _read_encoder(file)
    config = _read_json(path / "tokenizer_config.json")
    return Tokenizer(
        encoders=Encoders(front=front, continuation=_without_prefix_space(front)),
        token_bytes=token_bytes(front),
        bos_id=_added_bos(front, config),
        eos_ids=_eos_ids(path) | _token_ids(front, config.get("eos_token")),
        chat_template=_chat_template(path, config),
    )


def no_tokenizer(path: Path) -> Tokenizer:
    """For a folder with a config.json only: requests must send token ids."""
    return Tokenizer(encoders=None, token_bytes=(), eos_ids=_eos_ids(path))


def _read_encoder(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no kind of its own
        raise ValueError(f"{file} is no tokenizer: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Of a file that need not be there."""
    if not path.is_file():
        return {}
    try:
        content: Any = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return cast(dict[str, Any], content)


def _eos_ids(path: Path) -> frozenset[int]:
    """Chat models name the end of a turn in the generation config only."""
    configs = [_read_json(path / name) for name in ("config.json", "generation_config.json")]
    found = list[Any]()
    for config in configs:
        named: Any = config.get("eos_token_id")
        found += named if isinstance(named, list) else [named]
    ids = [token_id for token_id in found if token_id is not None]
    wrong = [token_id for token_id in ids if type(token_id) is not int]
    if wrong:
        raise ValueError(f"eos_token_id of {path}: {wrong[0]!r} is no token id")
    return frozenset(ids)


def _token_ids(encoder: tokenizers.Tokenizer, token: Any) -> frozenset[int]:
    match token:
        case str(text) | {"content": str(text)}:
            token_id = encoder.token_to_id(text)
            return frozenset() if token_id is None else frozenset({token_id})
        case _:
            return frozenset()


def _added_bos(encoder: tokenizers.Tokenizer, config: Mapping[str, Any]) -> int | None:
    if config.get("add_bos_token") is False:
        return None
    if config.get("add_bos_token") is True:
        return next(iter(_token_ids(encoder, config.get("bos_token"))), None)
    plain = encoder.encode("a", add_special_tokens=False).ids
    special = encoder.encode("a", add_special_tokens=True).ids
    return special[0] if special[:1] != plain[:1] else None


def _chat_template(path: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    file = path / "chat_template.jinja"
    template = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    return chat_template(template, named_tokens(config))


def _without_prefix_space(encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that puts no space before a text, or the tokenizer itself if it puts none."""
    definition = json.loads(encoder.to_str())
    changed = json.loads(encoder.to_str())
    changed["normalizer"] = _keep_start(changed["normalizer"], "normalizers")
    changed["pre_tokenizer"] = _keep_start(changed["pre_tokenizer"], "pretokenizers")
    if changed == definition:
        return encoder
    return tokenizers.Tokenizer.from_str(json.dumps(changed))


def _keep_start(part: dict[str, Any] | None, children: str) -> dict[str, Any] | None:
    match part:
        case None | {"type": "Prepend"}:
            return None
        case {"type": "Sequence"}:
            kept = [_keep_start(child, children) for child in part[children]]
            return {**part, children: [child for child in kept if child is not None]}
        case {"type": "Metaspace"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**part, "add_prefix_space": False}
        case _:
            return part
