"""The largest request that a server accepts, in one table."""

from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from pydantic import ConfigDict

from stemserve.service.config.access import STRICT

CPU_STEP_TOKENS = 512  # about a second of a small model
GPU_STEP_TOKENS = 9_216  # 20 ms of a model of 0.6B on an H200, 130 ms of 4B
MOST_DRAFT_TOKENS = 32  # of one draft
MOST = (1 << 31) - 1  # what gRPC's options and Info's answer can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Reported by Info.GetLimits and described in docs/limits.md; what a request could exceed is
    checked before anything is allocated for it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    max_message_bytes: int = 64 << 20  # requests and answers
    max_metadata_bytes: int = 16 << 10  # of one call; names count too, and 32 bytes an entry
    max_concurrent_calls: int = 2_048  # open at once, streams too
    max_contexts: int = 256
    max_items: int = 10_000
    max_labels: int = 1_024
    max_label_tokens: int = 64  # of one label
    max_request_tokens: int = 1 << 20  # all that a call names, and what its labels repeat
    max_text_characters: int = 4 << 20  # all texts of a call together
    max_chat_messages: int = 1_024
    max_chat_render_ms: int = 2_000  # that the model's chat template may take
    max_n: int = 64
    max_beams: int = 256
    max_stop_strings: int = 16
    max_stop_characters: int = 256  # of one stop string
    max_top_logprobs: int = 20
    max_choices: int = 1_024  # texts of a constraint
    max_constraint_characters: int = 64 << 10  # of one constraint
    max_compile_ms: int = 5_000  # of one constraint
    max_token_sequences: int = 1_000_000  # of a constraint or a trie
    max_tries: int = 256  # uploaded at once
    max_trie_bytes: int = 1 << 30  # of all of them, uploads included
    max_stream_calls: int = 64  # running at once on one ScoreStream
    max_unread_tokens: int = 8_192  # of one generation whose client does not read
    max_prefixes: int = 10_000  # registered at once
    max_prefix_tokens: int = 16 << 20  # of all of them, parents counted in each child
    max_queued_requests: int = 1_024
    max_queued_tokens: int = 4 << 20
    max_queued_ms: int = 600_000  # that all accepted work may take, at the speed seen so far
    max_step_tokens: int = 0  # 0: as many as suit the worker's device

    def __post_init__(self) -> None:
        for name, limit in asdict(self).items():
            least = 0 if name == "max_step_tokens" else 1
            if not least <= limit <= MOST:
                raise ValueError(f"{name} must be in {least} .. {MOST}")

    def on(self, device: str) -> "Limits":
        """With the rows of a step that suit the device."""
        rows = GPU_STEP_TOKENS if device == "cuda" else CPU_STEP_TOKENS
        return replace(self, max_step_tokens=self.max_step_tokens or rows)
