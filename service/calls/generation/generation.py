"""Turn a Generate request into a job for the engine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from stemserve.proto.v1 import inference_pb2
from stemserve.service.caller import Caller
from stemserve.service.calls.context_encoder import ContextEncoder, EncodedContext
from stemserve.service.calls.generation.beam_validation import (
    beam_spec,
    check_candidates,
    check_end,
)
from stemserve.service.calls.generation.generate_counts import new_tokens, sample_count
from stemserve.service.calls.generation.generate_validation import check_generate
from stemserve.service.calls.generation.request_constraints import RequestConstraints
from stemserve.service.calls.validation import check_priority
from stemserve.service.calls.wire_tokens import NO_IDS, decode_ids
from stemserve.service.errors import InvalidRequest
from stemserve.service.limits import Limits
from stemserve.service.request import Float32, GenerateJob, Int32, SamplerSpec, WorkerFacts

WORD = (1 << 64) - 1
GOLDEN_STEP = 0x9E3779B97F4A7C15


class _Choice(NamedTuple):
    """What a request says of the tokens that may come."""

    bias_ids: Int32  # [biases]
    bias_values: Float32  # [biases]
    banned_ids: Int32  # [banned] ascending
    allowed_ids: Int32  # [allowed] ascending, none of them banned; empty: all


class GenerateEncoder:
    def __init__(
        self,
        contexts: ContextEncoder,
        eos_ids: frozenset[int],
        limits: Limits,
        facts: WorkerFacts,
        constraints: RequestConstraints,
    ) -> None:
        self._contexts = contexts
        self._eos_ids = eos_ids
        self._limits = limits
        self._facts = facts
        self._constraints = constraints

    async def encode(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        *,
        request_id: str,
        entropy: int,
    ) -> GenerateJob:
        """`entropy` is the seed where the request has none. Raises RequestError."""
        check_generate(request, self._limits, self._facts)
        check_priority(request.priority, caller)
        vocab_size = self._facts.vocab_size
        stop_ids = decode_ids("stop_token_ids", request.stop_token_ids, vocab_size)
        choice = _choice(request.sampling, vocab_size)
        eos_ids = frozenset[int]() if request.ignore_eos else self._eos_ids
        ends = eos_ids | frozenset(stop_ids.tolist())
        if request.min_new_tokens:
            _check_choice(choice, ends, vocab_size)
        beams = beam_spec(request)
        if beams is not None:
            check_candidates(beams, ends, vocab_size)
            check_end(request, ends, vocab_size)
        context = await self._context(request, caller)
        prompt = context.tokens
        constraint = await self._constraints.of(request, caller)
        room = _room(prompt, self._facts.context_tokens)
        seed = request.sampling.seed if request.sampling.HasField("seed") else entropy
        asked_ids = decode_ids("logprob_token_ids", request.logprob_token_ids, vocab_size)
        samples = sample_count(request) if beams is None else 0
        first = _sampler(request, choice, asked_ids)
        return GenerateJob(
            request_id=request_id,
            prompt=prompt,
            samplers=tuple(replace(first, seed=child_seed(seed, i)) for i in range(samples)),
            max_new_tokens=min(new_tokens(request), room),
            stop_ids=ends,
            priority=request.priority,
            salt=caller.salt,
            trunk=context.trunk,
            tenant=caller.tenant,
            kernel=request.kernel,
            constraint=constraint,
            prompt_logprobs=request.prompt_logprobs,
            beams=beams,
            draft_tokens=request.draft_tokens if request.HasField("draft_tokens") else None,
        )

    async def _context(
        self, request: inference_pb2.GenerateRequest, caller: Caller
    ) -> EncodedContext:
        if request.HasField("chat"):
            return await self._contexts.encode_chat("chat", request.chat)
        (context,) = await self._contexts.encode("prompt", [request.prompt], caller)
        return context


def child_seed(seed: int, sample: int) -> int:
    """splitmix64 of the request's seed: samples differ, and sample i does not depend on n."""
    value = (seed + (sample + 1) * GOLDEN_STEP) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def _sampler(
    request: inference_pb2.GenerateRequest,
    choice: _Choice,
    logprob_ids: Int32,  # [tokens] whose log-probabilities are asked for
) -> SamplerSpec:
    """Of all samples; each has a seed of its own."""
    sampling = request.sampling
    return SamplerSpec(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        seed=0,
        bias_ids=choice.bias_ids,
        bias_values=choice.bias_values,
        banned_ids=choice.banned_ids,
        min_new_tokens=request.min_new_tokens,
        top_logprobs=request.top_logprobs,
        repetition_penalty=(
            sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
        ),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        allowed_ids=choice.allowed_ids,
        logprob_ids=logprob_ids,
    )


def _choice(sampling: inference_pb2.SamplingParams, vocab_size: int) -> _Choice:
    bias_ids, bias_values = _bias(sampling, vocab_size)
    banned_ids = _banned(sampling, vocab_size)
    allowed_ids = _allowed(sampling, banned_ids, vocab_size)
    return _Choice(bias_ids, bias_values, banned_ids, allowed_ids)


def _bias(sampling: inference_pb2.SamplingParams, vocab_size: int) -> tuple[Int32, Float32]:
    items: Sequence[tuple[int, float]] = sorted(sampling.logit_bias.items())
    ids = decode_ids("sampling.logit_bias", [token_id for token_id, _ in items], vocab_size)
    return ids, np.array([bias for _, bias in items], dtype=np.float32)


def _banned(sampling: inference_pb2.SamplingParams, vocab_size: int) -> Int32:
    if not sampling.banned_token_ids:
        return NO_IDS
    field = "sampling.banned_token_ids"
    banned = np.unique(decode_ids(field, sampling.banned_token_ids, vocab_size))
    if len(banned) == vocab_size:
        raise InvalidRequest(field, "bans every token")
    return banned


def _allowed(sampling: inference_pb2.SamplingParams, banned: Int32, vocab_size: int) -> Int32:
    """Those that are not banned too; none: all may come."""
    if not sampling.allowed_token_ids:
        return NO_IDS
    field = "sampling.allowed_token_ids"
    asked = np.unique(decode_ids(field, sampling.allowed_token_ids, vocab_size))
    allowed: Int32 = np.setdiff1d(asked, banned)
    if not len(allowed):
        raise InvalidRequest(field, "leaves no token: each of them is banned")
    return allowed


def _check_choice(choice: _Choice, ends: frozenset[int], vocab_size: int) -> None:
    """Some token must be left before `min_new_tokens`, when none may end the sample."""
    if len(choice.allowed_ids):
        leaves_none = ends.issuperset(choice.allowed_ids.tolist())
    else:
        ends_known = {token_id for token_id in ends if token_id < vocab_size}
        leaves_none = len(ends_known.union(choice.banned_ids.tolist())) == vocab_size
    if leaves_none:
        raise InvalidRequest(
            "min_new_tokens",
            "leaves no token: each is banned, not allowed or would end the sample",
        )


def _room(prompt: Int32, context_tokens: int) -> int:
    if not len(prompt):
        raise InvalidRequest("prompt", "has no tokens; give a text, token ids, a prefix or a chat")
    if len(prompt) >= context_tokens:
        raise InvalidRequest(
            "prompt",
            f"has {len(prompt)} tokens, which leaves no room for a new one in the model's "
            f"{context_tokens}",
        )
    return context_tokens - len(prompt)
