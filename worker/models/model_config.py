"""What a forward pass must know about a model, whatever file it came from."""

import logging
from dataclasses import dataclass
from enum import StrEnum

import torch

from stemserve.kernels.layout import HeadShape
from stemserve.worker.models.errors import ConfigError
from stemserve.worker.models.rope import RopeConfig

logger = logging.getLogger(__name__)


class Family(StrEnum):
    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MISTRAL = "mistral"


class Head(StrEnum):
    """What reads the final hidden states."""

    LANGUAGE_MODEL = "language_model"
    CLASSIFIER = "classifier"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str  # as the checkpoint names it, such as LlamaForCausalLM
    family: Family
    head: Head
    vocab_size: int
    context_tokens: int
    num_layers: int
    hidden_size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig
    rms_eps: float
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = False  # the LM head is the embedding matrix
    class_labels: tuple[str, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    checkpoint_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ConfigError(
                f"{self.query_heads} query heads are not a multiple of {self.kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim {self.head_dim} is odd; rotary embedding needs an even one"
            )
        if self.head is Head.CLASSIFIER and not self.class_labels:
            raise ConfigError(f"{self.architecture} has no class labels")

    @property
    def has_lm_head(self) -> bool:
        return self.head is Head.LANGUAGE_MODEL

    @property
    def heads(self) -> HeadShape:
        return HeadShape(
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
        )

    @property
    def query_size(self) -> int:
        return self.query_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


def context_within(window: int | None, context_tokens: int, *, source: str) -> int:
    """The context that a model with a sliding window (None: it has none) can be given.

    A sequence no longer than the window sees all of itself, as without one.
    """
    if window is None or window >= context_tokens:
        return context_tokens
    logger.warning(
        "%s: context cut from %d to %d tokens, the model's sliding window; "
        "longer contexts are not supported",
        source,
        context_tokens,
        window,
    )
    return window
