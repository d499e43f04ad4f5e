"""How one sampler slot draws its tokens: decoded from its message and checked."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stemserve.kernels.layout import Int32
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import BadPlan, decode_float32, decode_int32
from stemserve.worker.steps.checks import check_range

Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]

_NO_BITS = np.zeros(0, np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerParams:
    slot: int
    temperature: float  # at most GREEDY_TEMPERATURE: the most likely token
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    seed: int  # 64 bits
    bias_ids: Int32  # [biases]
    bias_values: Float32  # [biases] added to the logits of bias_ids
    banned_ids: Int32  # [banned] never drawn
    min_tokens_banned_ids: Int32  # banned while sample_index < min_new_tokens
    min_new_tokens: int
    top_logprobs: int
    repetition_penalty: float  # 1: off
    presence_penalty: float  # 0: off
    frequency_penalty: float  # 0: off
    prompt_ids: Int32  # that repetition_penalty counts beside what is drawn
    generated_ids: Int32  # drawn before the slot was given, in order
    allowed_ids: Int32  # only these may come; empty: all
    logprob_ids: Int32  # whose log-probabilities are read
    reads_only: bool  # nothing is drawn: top_logprobs are read, of the step's mask if there is one

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


class TokenMask(NamedTuple):
    """Tokens that may be drawn into a slot, in one step: as bits or, where they are few, as ids."""

    slot: int
    bits: UInt8  # [ceil(vocab / 8)] the lowest first; empty: there are ids
    ids: Int32  # ascending

    @property
    def size(self) -> int:
        """How many tokens it allows."""
        return len(self.ids) or int(np.bitwise_count(self.bits).sum())


def decode_masks(
    messages: Sequence[worker_pb2.TokenMask], *, vocab_size: int
) -> tuple[TokenMask, ...]:
    """The ids of all at once: a search has hundreds of masks. Raises BadPlan."""
    blobs = [message.allowed_ids for message in messages]
    ids = _token_ids("masks: allowed_ids", b"".join(blobs), vocab_size)
    ends: list[int] = np.cumsum([len(blob) // 4 for blob in blobs]).tolist()
    starts = [0, *ends[:-1]]
    ascend = ids[1:] > ids[:-1]
    ascend[[start - 1 for start in starts if 0 < start < len(ids)]] = True  # of another mask
    if not ascend.all() or any(len(blob) % 4 for blob in blobs):
        raise BadPlan("masks: allowed_ids must be whole numbers that ascend")
    bytes_of_bits = -(-vocab_size // 8)
    masks: list[TokenMask] = []
    for message, start, end in zip(messages, starts, ends, strict=True):
        bits = _NO_BITS if start < end else np.frombuffer(message.allowed, np.uint8)
        if start < end and message.allowed:
            raise BadPlan(f"mask of slot {message.slot}: there are bits beside its ids")
        if start == end and len(bits) != bytes_of_bits:
            where = f"mask of slot {message.slot}"
            raise BadPlan(f"{where}: {len(bits)} bytes for {vocab_size} tokens")
        masks.append(TokenMask(message.slot, bits, ids[start:end]))
    return tuple(masks)


def decode_sampler(message: worker_pb2.Sampler, *, slots: int, vocab_size: int) -> SamplerParams:
    """Raises BadPlan."""
    where = f"sampler of slot {message.slot}"
    if message.slot >= slots:
        raise BadPlan(f"{where}: the worker has {slots} slots")
    bias_ids, bias_values = _biases(where, message, vocab_size)
    _check_shape(where, message)
    _check_reads(where, message, vocab_size)
    _check_penalties(where, message)
    return SamplerParams(
        slot=message.slot,
        temperature=message.temperature,
        top_k=0 if message.top_k >= vocab_size else message.top_k,
        # proto3 cannot tell an absent top_p from 0. The shortest decimal of the float32: 0.3 of 10
        # equal tokens are 3, not the 4 that 0.30000001192 takes.
        top_p=float(str(np.float32(message.top_p))) or 1.0,
        min_p=message.min_p,
        seed=message.seed,
        bias_ids=bias_ids,
        bias_values=bias_values,
        banned_ids=_token_ids(f"{where}: banned_ids", message.banned_ids, vocab_size),
        min_tokens_banned_ids=_token_ids(
            f"{where}: min_tokens_banned_ids", message.min_tokens_banned_ids, vocab_size
        ),
        min_new_tokens=message.min_new_tokens,
        top_logprobs=message.top_logprobs,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        prompt_ids=_token_ids(f"{where}: prompt_ids", message.prompt_ids, vocab_size),
        generated_ids=_token_ids(f"{where}: generated_ids", message.generated_ids, vocab_size),
        allowed_ids=_token_ids(f"{where}: allowed_ids", message.allowed_ids, vocab_size),
        logprob_ids=_token_ids(f"{where}: logprob_ids", message.logprob_ids, vocab_size),
        reads_only=message.reads_only,
    )


def _biases(
    where: str, message: worker_pb2.Sampler, vocab_size: int
) -> tuple[Int32, Float32]:  # token ids, and what is added to the logit of each
    ids = _token_ids(f"{where}: bias_ids", message.bias_ids, vocab_size)
    values = decode_float32(f"{where}: bias_values", message.bias_values)
    if len(ids) != len(values):
        raise BadPlan(f"{where}: {len(ids)} bias_ids but {len(values)} bias_values")
    if np.isnan(values).any() or (values == np.inf).any():
        raise BadPlan(f"{where}: a bias must not be NaN or +inf")
    return ids, values


def _check_shape(where: str, message: worker_pb2.Sampler) -> None:
    """Of the distribution that is drawn from."""
    if not (math.isfinite(message.temperature) and message.temperature >= 0):
        raise BadPlan(f"{where}: temperature {message.temperature} is not a number >= 0")
    if not 0 <= message.top_p <= 1:
        raise BadPlan(f"{where}: top_p {message.top_p} is not in [0, 1]")
    if not 0 <= message.min_p <= 1:
        raise BadPlan(f"{where}: min_p {message.min_p} is not in [0, 1]")


def _check_reads(where: str, message: worker_pb2.Sampler, vocab_size: int) -> None:
    if message.top_logprobs > vocab_size:
        raise BadPlan(f"{where}: top_logprobs {message.top_logprobs} is above {vocab_size}")
    if message.reads_only and message.logprob_ids:
        raise BadPlan(f"{where}: reads_only and logprob_ids exclude each other")
    if message.reads_only and not message.top_logprobs:
        raise BadPlan(f"{where}: reads_only without top_logprobs reads nothing")


def _check_penalties(where: str, message: worker_pb2.Sampler) -> None:
    repetition = message.repetition_penalty
    if not (math.isfinite(repetition) and repetition >= 0):
        raise BadPlan(f"{where}: repetition_penalty {repetition} is not a number > 0")
    for name in ("presence_penalty", "frequency_penalty"):
        penalty: float = getattr(message, name)
        if not math.isfinite(penalty):
            raise BadPlan(f"{where}: {name} {penalty} is not finite")


def _token_ids(name: str, blob: bytes, vocab_size: int) -> Int32:
    ids = decode_int32(name, blob)
    check_range(name, ids, 0, vocab_size)
    return ids
