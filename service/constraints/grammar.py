"""Constraints on text: choices, regular expressions, JSON schemas and grammars, by llguidance."""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import llguidance
import numpy as np
import tokenizers

from stemserve.service.constraints.allowed import AllowedBits
from stemserve.service.constraints.constraint import ConstraintFault
from stemserve.service.constraints.forced_start import start_problem, unforced
from stemserve.service.errors import InvalidRequest
from stemserve.service.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # in its stub only

# One way to write a JSON value: a model that may put in space can put in nothing else for ever.
JSON_STYLE: "JsonCompileOptions" = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": False,  # a keyword that would not be obeyed is refused
}
# What one compilation, and one mask, may do: some 20 and 5 ms. The rest bounds memory.
COMPILE_FUEL = 1_000_000
MASK_FUEL = 60_000
MASK_ITEMS = 25_000
LEXER_STATES = 20_000
GRAMMAR_SIZE = 200_000
GRAMMAR_BYTES = 1 << 20  # of a compiled one; most take less
PROBLEM_CHARACTERS = 300  # of what the library says


class Source(NamedTuple):
    kind: str  # the request's field
    text: str  # of `choice`: a JSON list


class Vocabulary:
    """A tokenizer as the library sees it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: width of the model's logits."""
        self.vocab_bytes = -(-vocab_size // 8)
        self.texts = tokenizer.token_bytes[:vocab_size]  # of the tokens; of special ones empty
        self.tokens = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Facts(tokenizer, self.texts)),
            eos_token=_end_ids(tokenizer, self.texts),
        )
        self.mask_bytes = -(-len(self.texts) // 32) * 4


class _Facts:
    """What the library asks of a tokenizer, in its names."""

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes]) -> None:
        if tokenizer.encoders is None:
            raise InvalidRequest("constraint", "this model has no tokenizer; use a set of tokens")
        encoder = tokenizers.Tokenizer.from_str(tokenizer.encoders.continuation.to_str())
        encoder.encode_special_tokens = True  # "<|im_end|>" in a text is text
        self._encoder = encoder
        self._ids = {text: token for token, text in enumerate(tokens) if text}
        self._longest = max(map(len, self._ids), default=1)
        self.tokens = list(tokens)
        self.special_token_ids = [token for token, text in enumerate(tokens) if not text]
        self.eos_token_id = _end_ids(tokenizer, tokens)[0]
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text that is the only one that can follow."""
        blob = text.encode() if isinstance(text, str) else text
        characters = blob.decode(errors="replace")
        ids: list[int] = self._encoder.encode(characters, add_special_tokens=False).ids
        known = all(token < len(self.tokens) for token in ids)
        if known and b"".join(self.tokens[token] for token in ids) == blob:
            return ids
        return list(self._longest_matches(blob))

    def _longest_matches(self, blob: bytes) -> Iterator[int]:
        start = 0
        while start < len(blob):
            ends = range(min(len(blob), start + self._longest), start, -1)
            end = next((end for end in ends if blob[start:end] in self._ids), None)
            if end is None:
                return
            yield self._ids[blob[start:end]]
            start = end


def _end_ids(tokenizer: Tokenizer, tokens: Sequence[bytes]) -> list[int]:
    ends = sorted(token for token in tokenizer.eos_ids if token < len(tokens))
    if not ends:
        raise InvalidRequest("constraint", "this model has no end-of-sequence token")
    return ends


class GrammarConstraint:
    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        """Raises ConstraintFault where nothing can begin."""
        self._first = GrammarState(matcher, vocabulary)
        self._first.allowed()  # made here, once for all that start

    @property
    def num_bytes(self) -> int:
        return GRAMMAR_BYTES

    @property
    def masks_take_long(self) -> bool:
        return True

    def start(self) -> "GrammarState":
        return self._first.fork()


class GrammarState:
    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        allowed: AllowedBits | None = None,
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._allowed = allowed  # once it is known

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_accepting()

    @property
    def is_closed(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self) -> AllowedBits:
        if self._allowed is not None:
            return self._allowed
        sizes = self._vocabulary
        bits = np.zeros(max(sizes.mask_bytes, sizes.vocab_bytes), np.uint8)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, sizes.mask_bytes)
        self._check()
        self._allowed = AllowedBits(bits[: sizes.vocab_bytes])
        return self._allowed

    def advance(self, token: int) -> None:
        self._allowed = None
        self._matcher.consume_token(token)
        self._check()

    def fork(self) -> "GrammarState":
        return GrammarState(self._matcher.deep_copy(), self._vocabulary, self._allowed)

    def _check(self) -> None:
        # With an error the library would allow the end, wherever it is.
        if self._matcher.is_error():
            raise ConstraintFault(f"the constraint cannot be followed: {_problem(self._matcher)}")


def compile_source(source: Source, vocabulary: Vocabulary) -> GrammarConstraint:
    """Takes as long as the fuel lasts. Raises InvalidRequest."""
    grammar = _grammar(source)
    matcher = _matcher(grammar, vocabulary)
    if matcher.is_error():
        raise InvalidRequest(source.kind, _problem(matcher))
    problem = start_problem(_matcher(unforced(grammar), vocabulary), vocabulary.texts)
    if problem is not None:
        raise InvalidRequest(source.kind, _shortened(problem))
    try:
        return GrammarConstraint(matcher, vocabulary)
    except ConstraintFault as fault:
        raise InvalidRequest(source.kind, f"nothing can begin: {fault}") from fault


def _matcher(grammar: str, vocabulary: Vocabulary) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(
        vocabulary.tokens,
        grammar,
        log_level=0,
        limits=llguidance.LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL,
            step_lexer_fuel=MASK_FUEL,
            step_max_items=MASK_ITEMS,
            max_lexer_states=LEXER_STATES,
            max_grammar_size=GRAMMAR_SIZE,
            precompute_large_lexemes=False,
            verbose_errors=False,
        ),
    )


def _grammar(source: Source) -> str:
    match source.kind:
        case "choice":
            texts: list[str] = json.loads(source.text)
            return llguidance.LLMatcher.grammar_from_regex("|".join(map(_literal, texts)))
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(source.text)
        case "json_schema":
            try:
                return llguidance.LLMatcher.grammar_from_json_schema(
                    source.text,
                    overrides=JSON_STYLE,
                )
            except ValueError as error:
                raise InvalidRequest(source.kind, _schema_problem(source.text, error)) from error
        case "grammar":
            return llguidance.LLMatcher.grammar_from_lark(source.text)
        case kind:
            raise ValueError(f"no constraint is called {kind!r}")


def _literal(text: str) -> str:
    """A regular expression of this text only."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _schema_problem(schema: str, error: ValueError) -> str:
    """The library's words, which say nothing of use about a text that is no schema at all."""
    try:
        value = json.loads(schema)
    except json.JSONDecodeError as fault:
        return f"is not valid JSON: {fault}"
    except (ValueError, RecursionError):  # JSON, with more digits or levels than Python takes
        value = {}
    if not isinstance(value, dict | bool):
        return "is JSON, but no schema; a schema is an object"
    return str(error)[:PROBLEM_CHARACTERS]


def _problem(matcher: llguidance.LLMatcher) -> str:
    return _shortened(matcher.get_error() or "it is too complex")


def _shortened(text: str) -> str:
    return text.partition("\n<")[0].strip()[:PROBLEM_CHARACTERS]
