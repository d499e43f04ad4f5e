"""Jobs for the toy model, and their answers worked out one sequence at a time."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from tests.service.batcher_rig import Answer, Rig
from tests.service.toy_model import CLASSES, VOCAB, draw, extend, logits_of, logprobs_of, state_of

from stemserve.service.request import (
    Float32,
    GenerateJob,
    Int32,
    Job,
    JobUsage,
    SamplerSpec,
    ScoreJob,
)


def int32(values: Sequence[int] | Int32) -> Int32:
    return np.array(values, np.int32)


def random_tokens(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return tokens


def likelihood_job(
    request_id: str,
    contexts: list[list[int]],
    items: list[list[int]],
    item_context: list[int] | None = None,
    **options: Any,
) -> ScoreJob:
    """Reads each token of each item; the first only where something comes before it."""
    item_context = item_context or [0] * len(items)
    gathers = [
        (unit, offset, item[offset + 1])
        for unit, item in enumerate(items)
        for offset in range(-1 if contexts[item_context[unit]] else 0, len(item) - 1)
    ]
    return ScoreJob(
        request_id=request_id,
        contexts=tuple(int32(context) for context in contexts),
        unit_tokens=int32([token for item in items for token in item]),
        unit_indptr=int32([0, *accumulate(map(len, items))]),
        unit_context=int32(item_context),
        gather_unit=int32([unit for unit, _, _ in gathers]),
        gather_offset=int32([offset for _, offset, _ in gathers]),
        gather_indptr=int32(range(len(gathers) + 1)),
        gather_ids=int32([token for _, _, token in gathers]),
        **options,
    )


def label_job(
    request_id: str,
    contexts: list[list[int]],
    items: list[list[int]],
    labels: list[int],
    item_context: list[int] | None = None,
    **options: Any,
) -> ScoreJob:
    """Reads the labels behind each item's last token."""
    return ScoreJob(
        request_id=request_id,
        contexts=tuple(int32(context) for context in contexts),
        unit_tokens=int32([token for item in items for token in item]),
        unit_indptr=int32([0, *accumulate(map(len, items))]),
        unit_context=int32(item_context or [0] * len(items)),
        gather_unit=int32(range(len(items))),
        gather_offset=int32([len(item) - 1 for item in items]),
        gather_indptr=int32([n * len(labels) for n in range(len(items) + 1)]),
        gather_ids=int32(labels * len(items)),
        **options,
    )


def generate_job(
    request_id: str,
    prompt: list[int],
    *,
    samples: int = 1,
    max_new_tokens: int = 8,
    temperature: float = 0.0,
    stop_ids: frozenset[int] = frozenset(),
    seed: int = 0,
    **options: Any,
) -> GenerateJob:
    specs = [
        SamplerSpec(
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=seed + index,
            bias_ids=int32([]),
            bias_values=np.zeros(0, np.float32),
            banned_ids=int32([]),
            min_new_tokens=0,
            top_logprobs=0,
        )
        for index in range(samples)
    ]
    return GenerateJob(
        request_id=request_id,
        prompt=int32(prompt),
        samplers=tuple(specs),
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        **options,
    )


def unit_sequences(job: ScoreJob) -> list[tuple[list[int], list[int]]]:
    """Context and tokens of each unit."""
    contexts: list[list[int]] = [list(map(int, context)) for context in job.contexts]
    bounds: list[int] = job.unit_indptr.tolist()
    tokens: list[int] = job.unit_tokens.tolist()
    return [
        (contexts[int(job.unit_context[unit])], tokens[bounds[unit] : bounds[unit + 1]])
        for unit in range(len(bounds) - 1)
    ]


def expected_scores(job: ScoreJob) -> tuple[Float32, Int32, Float32]:
    """Gathered log-probabilities, most likely ids and class scores, one sequence at a time."""
    logprobs: list[float] = []
    argmax: list[int] = []
    units = unit_sequences(job)
    for gather in range(len(job.gather_unit)):
        context, tokens = units[int(job.gather_unit[gather])]
        state = state_of(context + tokens[: int(job.gather_offset[gather]) + 1])
        ids = job.gather_ids[job.gather_indptr[gather] : job.gather_indptr[gather + 1]]
        logprobs += logprobs_of(state)[ids].tolist()
        argmax.append(int(logits_of(state).argmax()))
    scores = [logits_of(state_of(context + tokens), CLASSES) for context, tokens in units]
    classes = np.array(scores if job.classify else [], np.float32)
    return np.array(logprobs, np.float32), int32(argmax), classes


def expected_tokens(job: GenerateJob) -> dict[int, list[int]]:
    """Tokens of each sample, drawn one sequence at a time."""
    samples: dict[int, list[int]] = {}
    for sample, spec in enumerate(job.samplers):
        state = state_of(job.prompt.tolist())
        tokens: list[int] = []
        while len(tokens) < job.max_new_tokens and not (tokens and tokens[-1] in job.stop_ids):
            tokens.append(draw(state, spec, len(tokens)))
            state = extend(state, tokens[-1])
        samples[sample] = tokens
    return samples


def assert_right(job: Job, answer: Answer) -> None:
    assert answer.error is None
    if isinstance(job, GenerateJob):
        assert answer.tokens == expected_tokens(job)
        assert usage_of(answer).output_tokens == sum(map(len, answer.tokens.values()))
    else:
        assert answer.result is not None
        logprobs, argmax, classes = expected_scores(job)
        np.testing.assert_array_equal(answer.result.gather_logprobs, logprobs)
        np.testing.assert_array_equal(answer.result.gather_argmax, argmax)
        np.testing.assert_array_equal(answer.result.class_scores.ravel(), classes.ravel())
        assert not len(answer.result.failed_units)
    usage = usage_of(answer)
    parts = (usage.cached_tokens, usage.shared_tokens, usage.computed_tokens)
    assert min(parts) >= 0 and usage.prompt_tokens == sum(parts)


def again(job: Job, number: int) -> Job:
    return replace(job, request_id=f"{job.request_id} {number}")


def usage_of(answer: Answer) -> JobUsage:
    if answer.result is not None:
        return answer.result.usage
    assert answer.last is not None and answer.last.usage is not None
    return answer.last.usage


def run_right(rig: Rig, *jobs: Job) -> list[JobUsage]:
    answers = rig.run(*jobs)
    for job, answer in zip(jobs, answers, strict=True):
        assert_right(job, answer)
    return [usage_of(answer) for answer in answers]
