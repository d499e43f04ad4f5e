"""Rotary position embedding, in the half-split convention of Hugging Face checkpoints."""

import math
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths divided by a factor, short ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Dimensions that turn often are kept, slow ones are divided, a ramp between (YaRN)."""

    factor: float
    original_context_tokens: int
    beta_fast: float
    beta_slow: float
    attention_factor: float  # multiplies cos and sin
    truncate: bool  # the ramp starts and ends at whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyDivisors:
    """One divisor for each frequency, as GGUF files store them."""

    divisors: tuple[float, ...]  # [head_dim / 2]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyDivisors


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    theta: float
    scaling: RopeScaling | None = None

    @property
    def attention_factor(self) -> float:
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0


class Rotation(NamedTuple):
    """Cosine and sine of every row's angles."""

    cos: Tensor  # [rows, 1, head_dim / 2], float32
    sin: Tensor  # [rows, 1, head_dim / 2], float32


class RotaryEmbedding:
    """Makes the rotation of the rows of a step: once a step, for all layers."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._attention_factor = rope.attention_factor

    def rotation(self, positions: Tensor) -> Rotation:
        angles = positions.float().unsqueeze(-1) * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cos, sin = cos * self._attention_factor, sin * self._attention_factor
        return Rotation(cos.unsqueeze(1), sin.unsqueeze(1))


def rotate(
    x: Tensor,  # [rows, heads, head_dim]
    rotation: Rotation,
) -> Tensor:  # [rows, heads, head_dim]
    first, second = x.chunk(2, dim=-1)
    half = first.shape[-1]
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    torch.mul(first, rotation.cos, out=out[..., :half])
    torch.mul(second, rotation.cos, out=out[..., half:])
    out[..., :half].addcmul_(second.float(), rotation.sin, value=-1)
    out[..., half:].addcmul_(first.float(), rotation.sin)
    return out.to(x.dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:  # [head_dim / 2], float32
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents
    match rope.scaling:
        case None:
            return 1.0 / wavelengths
        case LinearScaling(factor=factor):
            return 1.0 / wavelengths / factor
        case Llama3Scaling():
            return _llama3(1.0 / wavelengths, rope.scaling)
        case YarnScaling():
            return _yarn(wavelengths, rope.theta, rope.scaling)
        case FrequencyDivisors(divisors=divisors):
            return 1.0 / wavelengths / torch.tensor(divisors, dtype=torch.float32)
        case _:
            assert_never(rope.scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_context_tokens * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn(wavelengths: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    half = len(wavelengths)

    def dimension(turns: float) -> float:
        """Where the angle makes this many turns over the original context."""
        ratio = scaling.original_context_tokens / (turns * 2 * math.pi)
        return half * math.log(ratio) / math.log(theta)

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return ramp / (scaling.factor * wavelengths) + (1 - ramp) / wavelengths
