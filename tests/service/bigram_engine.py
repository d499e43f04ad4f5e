"""An engine whose next token depends on the last token only, so that answers are worked by hand."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.mask_work import Aside, MaskWork, run_here
from stemserve.service.batching.samples.guide import Guide
from stemserve.service.constraints.allowed import Allowed
from stemserve.service.request import (
    GenerateChunk,
    GenerateJob,
    Int32,
    Job,
    JobTiming,
    JobUsage,
    Load,
    Realm,
    SampleTokens,
    ScoreJob,
    ScorePart,
    ScoreResult,
    StopCause,
    TopTokens,
    WorkerFacts,
)
from stemserve.service.stream_pace import StreamPace

Float64 = NDArray[np.float64]

THREE_TOKENS = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])


def random_bigrams(vocab_size: int, seed: int = 0) -> Float64:
    weights = np.random.default_rng(seed).random((vocab_size, vocab_size)) + 0.01
    rows: Float64 = weights / weights.sum(axis=1, keepdims=True)
    return rows


class BigramEngine:
    """`probabilities[last, next]`; without a last token all are equally likely."""

    def __init__(
        self,
        probabilities: Float64 = THREE_TOKENS,
        *,
        context_tokens: int = 64,
        classes: int = 0,
        script: Sequence[Sequence[int]] = (),
    ) -> None:
        self.probabilities = probabilities
        self.script = script  # tokens of each sample, instead of drawn ones
        self.facts = WorkerFacts(
            model="bigram",
            architecture="bigram",
            dtype="float32",
            device="cpu",
            vocab_size=len(probabilities),
            context_tokens=context_tokens,
            layers=1,
            query_heads=1,
            kv_heads=1,
            head_dim=1,
            page_size=16,
            kv_pages=100,
            sampler_slots=16,
            steps_in_flight=2,
            has_lm_head=True,
            class_labels=tuple(f"class {index}" for index in range(classes)),
            kv_bytes_per_token=8,
        )
        self.jobs: list[Job] = []
        self.rate_checks: list[tuple[str, int]] = []
        self.failed_units: list[int] = []
        self.unread_units: list[int] = []
        self.error: Exception | None = None
        self.hold = asyncio.Event()  # calls wait for it
        self.hold.set()
        self.running = 0
        self.part_units = 1  # at a time, of a job that is answered in parts
        self.parts_before_hold = 0
        self.stopped: set[tuple[str, int]] = set()
        self.generation = 1
        self.pinned: dict[str, list[int]] = {}
        self.evicted_tokens = 0  # of each sequence before it can be pinned

    def without_lm_head(self) -> None:
        self.facts = replace(self.facts, has_lm_head=False)

    async def score(self, job: ScoreJob) -> ScoreResult:
        self.jobs.append(job)
        self.running += 1
        try:
            await self.hold.wait()
        finally:
            self.running -= 1
        return self._result(job)

    def _result(self, job: ScoreJob) -> ScoreResult:
        if self.error is not None:
            raise self.error
        rows = [self._row(job, gather) for gather in range(len(job.gather_unit))]
        logprobs = [
            np.log(row[job.gather_ids[job.gather_indptr[g] : job.gather_indptr[g + 1]]])
            for g, row in enumerate(rows)
        ]
        tokens = len(job.unit_tokens) + sum(map(len, job.contexts))
        return ScoreResult(
            request_id=job.request_id,
            gather_logprobs=np.concatenate([np.zeros(0), *logprobs]).astype(np.float32),
            gather_argmax=np.array([row.argmax() for row in rows], dtype=np.int32),
            class_scores=self._class_scores(job),
            failed_units=np.array(self.failed_units, dtype=np.int32),
            unread_units=np.array(self.unread_units, dtype=np.int32),
            usage=JobUsage(prompt_tokens=tokens, computed_tokens=tokens),
            timing=JobTiming(queue_s=0.001, engine_s=0.002),
        )

    async def score_parts(self, job: ScoreJob) -> AsyncGenerator[ScorePart | ScoreResult, None]:
        """The units in a random order, then the result; some parts come though calls wait."""
        self.jobs.append(job)
        result = self._result(job)
        self.running += 1
        try:
            read = np.setdiff1d(np.arange(len(job.unit_indptr) - 1), self.unread_units)
            order = np.random.default_rng(0).permutation(read).astype(np.int32)
            for number, start in enumerate(range(0, len(order), self.part_units)):
                if number >= self.parts_before_hold:
                    await self.hold.wait()
                units = np.sort(order[start : start + self.part_units])
                yield ScorePart(
                    request_id=job.request_id,
                    units=units,
                    failed_units=units[np.isin(units, result.failed_units)],
                    gather_logprobs=result.gather_logprobs,
                    gather_argmax=result.gather_argmax,
                    class_scores=result.class_scores,
                )
                await asyncio.sleep(0)
            await self.hold.wait()
            yield result
        finally:
            self.running -= 1

    async def generate(
        self, job: GenerateJob, pace: StreamPace
    ) -> AsyncGenerator[GenerateChunk, None]:
        """A chunk a token."""
        self.jobs.append(job)
        self.running += 1
        try:
            async for chunk in self._chunks(job):
                await self.hold.wait()
                pace.completes(chunk)
                yield chunk
        finally:
            self.running -= 1

    def stop_sample(self, request_id: str, sample: int) -> None:
        self.stopped.add((request_id, sample))

    async def explain(
        self, job: Job
    ) -> list[tuple[worker_pb2.StepPlan, worker_pb2.PredictResponse, Int32]]:
        raise NotImplementedError

    async def check_rates(self, tenant: str, least_tokens: int) -> None:
        self.rate_checks.append((tenant, least_tokens))

    async def load(self) -> Load:
        return Load(
            queued_requests=0,
            running_requests=self.running,
            queued_tokens=0,
            free_pages=90,
            cached_pages=4,
            used_pages=6,
        )

    async def pin(self, key: str, tokens: Int32, realm: Realm) -> int:
        if self.error is not None:
            raise self.error
        self.pinned[key] = tokens.tolist()
        return max(0, len(tokens) - self.evicted_tokens)

    async def unpin(self, key: str) -> None:
        self.pinned.pop(key, None)

    async def resident_tokens(self, tokens: Int32, realm: Realm) -> int:
        if self.error is not None:
            raise self.error
        return 0

    def _row(self, job: ScoreJob, gather: int) -> Float64:
        unit, offset = job.gather_unit[gather], job.gather_offset[gather]
        if offset >= 0:
            assert job.unit_indptr[unit] + offset < job.unit_indptr[unit + 1]
            return self._next(int(job.unit_tokens[job.unit_indptr[unit] + offset]))
        context = job.contexts[job.unit_context[unit]]
        assert len(context), "an empty context predicts nothing"
        return self._next(int(context[-1]))

    def _next(self, last: int) -> Float64:
        row: Float64 = self.probabilities[last]
        return row

    def _class_scores(self, job: ScoreJob) -> NDArray[np.float32]:
        """Class c of a unit scores its last token plus c."""
        classes = len(self.facts.class_labels)
        if not job.classify:
            return np.zeros((0, 0), dtype=np.float32)
        last = job.unit_tokens[job.unit_indptr[1:] - 1]
        return (last[:, None] + np.arange(classes)[None, :]).astype(np.float32)

    async def _chunks(self, job: GenerateJob) -> AsyncGenerator[GenerateChunk, None]:
        last = [int(job.prompt[-1])] * len(job.samplers)
        live = set(range(len(job.samplers)))
        guides = {
            sample: Guide(job.constraint, spec, job.stop_ids, _made_at_once)
            for sample, spec in enumerate(job.samplers)
            if job.constraint is not None
        }
        produced = 0
        for step in range(job.max_new_tokens):
            await asyncio.sleep(0)
            live -= {sample for name, sample in self.stopped if name == job.request_id}
            news = [
                self._token(job, sample, step, last[sample], guides.get(sample))
                for sample in sorted(live)
            ]
            produced += len(news)
            for token in news:
                last[token.sample] = token.token_ids[0]
            live -= {token.sample for token in news if token.finish}
            yield GenerateChunk(request_id=job.request_id, news=news)
            if not live:
                break
        prompt = len(job.prompt)
        yield GenerateChunk(
            request_id=job.request_id,
            news=(),
            usage=JobUsage(prompt_tokens=prompt, computed_tokens=prompt, output_tokens=produced),
            timing=JobTiming(queue_s=0.001, engine_s=0.002),
        )

    def _token(
        self, job: GenerateJob, sample: int, step: int, last: int, guide: Guide | None
    ) -> SampleTokens:
        row = self._next(last)
        if guide is not None:
            legal = np.zeros(len(row))
            legal[guide.mask.ids] = row[guide.mask.ids]
            row = legal / legal.sum()
        sampler = job.samplers[sample]
        if self.script:
            token_id = self.script[sample][step]
        elif sampler.temperature <= 1e-5:
            token_id = int(row.argmax())
        else:
            rng = np.random.default_rng((sampler.seed, step))
            token_id = int(rng.choice(len(row), p=row))
        finish = StopCause.LENGTH if step + 1 == job.max_new_tokens else None
        if token_id in job.stop_ids and step + 1 >= sampler.min_new_tokens:
            finish = StopCause.STOP_ID
        elif guide is not None and (
            guide.take(token_id, generated=step + 1, is_last=bool(finish))
            or guide.collect(generated=step + 1)
        ):
            finish = StopCause.COMPLETE
        best = np.argsort(-row, kind="stable")[: sampler.top_logprobs]
        return SampleTokens(
            sample=sample,
            token_ids=[token_id],
            logprobs=[float(np.log(row[token_id]))],
            tops=[TopTokens(best.tolist(), np.log(row[best]).tolist())],
            finish=finish,
        )


def _made_at_once(make: Callable[[], Allowed]) -> Aside[Allowed]:
    masks = MaskWork(run_here)
    aside = masks.add(0, make)
    masks.send()
    return aside
