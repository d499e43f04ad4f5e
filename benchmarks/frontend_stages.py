"""CPU time of each stage that a Score call passes, one after another in one thread, with no socket.

What threads, queues and connections add is in frontend_rounds.py.
"""

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import numpy as np
from workloads import ScoreWorkload, score_workload

from stemserve.proto.v1 import inference_pb2, worker_pb2
from stemserve.service.batching.batcher import Batcher, BatcherLimits
from stemserve.service.caller import ANYONE
from stemserve.service.calls.context_encoder import ContextEncoder
from stemserve.service.calls.prefixes.prefix_registry import PrefixRegistry, RegistryBounds
from stemserve.service.calls.scores.score_answer import score_response
from stemserve.service.calls.scores.score_encoder import ScoreEncoder
from stemserve.service.calls.scores.scoring import plan_score, score_job
from stemserve.service.client import decoding, token_blob
from stemserve.service.limits import Limits
from stemserve.service.packed_tokens import pack
from stemserve.service.request import Event, ScoreResult, WorkerFacts
from stemserve.service.serving.heap import keep_freed_memory
from stemserve.service.text.tokenizer import Tokenizer, TokenizerPool
from stemserve.worker.choice.shape_signature import signature
from stemserve.worker.scorer import plan_readout
from stemserve.worker.steps.checks import StepLimits
from stemserve.worker.steps.layout import candidates, group
from stemserve.worker.steps.step import decode_step

VOCAB, CONTEXT_TOKENS, PAGE_SIZE, KV_PAGES, SLOTS = 49_152, 16_384, 16, 16_384, 256
FACTS = WorkerFacts(
    model="none",
    architecture="none",
    dtype="float32",
    device="none",
    vocab_size=VOCAB,
    context_tokens=CONTEXT_TOKENS,
    layers=28,
    query_heads=16,
    kv_heads=8,
    head_dim=128,
    page_size=PAGE_SIZE,
    kv_pages=KV_PAGES,
    sampler_slots=SLOTS,
    steps_in_flight=2,
    has_lm_head=True,
    class_labels=(),
    kv_bytes_per_token=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    prefix_tokens: int
    items: int
    item_tokens: int

    @property
    def name(self) -> str:
        return f"{self.prefix_tokens} + {self.items} x {self.item_tokens}"

    def workload(self, rng: np.random.Generator) -> ScoreWorkload:
        return score_workload(
            rng,
            prefix_tokens=self.prefix_tokens,
            items=self.items,
            item_tokens=self.item_tokens,
        )


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.thread_time()

    def lap(self, stage: str) -> None:
        """What passed since the last lap is the stage's."""
        now = time.thread_time()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._at
        self._at = time.thread_time()


class Stages:
    """Calls of one shape after another, each with a prefix that nobody has seen."""

    def __init__(self, *, max_step_tokens: int) -> None:
        keep_freed_memory()  # as a server does
        limits = Limits()
        threads = ThreadPoolExecutor(1)
        registry = PrefixRegistry(
            RegistryBounds(max_prefixes=1, max_tokens=1), clock=time.monotonic
        )
        pool = TokenizerPool(
            Tokenizer(encoders=None, token_bytes=()), threads, long_executor=threads
        )
        contexts = ContextEncoder(pool, registry, vocab_size=VOCAB, limits=limits)
        self._encoder = ScoreEncoder(contexts, pool, limits, FACTS)
        self._batcher = Batcher(
            FACTS, BatcherLimits(max_step_tokens=max_step_tokens), clock=time.monotonic
        )
        self._limits = StepLimits(
            max_step_tokens=max_step_tokens,
            vocab_size=VOCAB,
            context_tokens=CONTEXT_TOKENS,
            page_size=PAGE_SIZE,
            kv_pages=KV_PAGES,
            sampler_slots=SLOTS,
            has_lm_head=True,
            classes=0,
        )
        self._numbers = itertools.count()

    def measure(self, shape: Shape, *, calls: int) -> dict[str, float]:
        """Milliseconds by stage: medians of all calls but a first quarter."""
        rng = np.random.default_rng(0)
        laps = [asyncio.run(self._call(shape.workload(rng))) for _ in range(calls)]
        kept = laps[calls // 4 :]
        return {stage: round(1e3 * median(lap[stage] for lap in kept), 4) for stage in kept[0]}

    async def _call(self, workload: ScoreWorkload) -> dict[str, float]:
        watch = _Stopwatch()
        blob = _request(workload).SerializeToString()
        watch.lap("client encodes")
        request = inference_pb2.ScoreRequest.FromString(blob)
        watch.lap("message parsed")
        call = await self._encoder.encode(request, ANYONE)
        watch.lap("checked, ids decoded")
        plan = plan_score(call)
        job = score_job(plan, request_id=f"{next(self._numbers)}", deadline=None)
        watch.lap("reads planned")
        self._batcher.submit(job)
        watch.lap("laid out, admitted")
        result = self._compute(watch)
        response = score_response(plan, result).SerializeToString()
        watch.lap("answer made")
        decoding.scores(inference_pb2.ScoreResponse.FromString(response))
        watch.lap("client decodes")
        return watch.seconds

    def _compute(self, watch: _Stopwatch) -> ScoreResult:
        events: list[Event] = []
        while True:
            plan = self._batcher.plan_step()
            watch.lap("steps planned")
            if plan is None:
                break
            blob = worker_pb2.RunRequest(plan=plan).SerializeToString()
            watch.lap("plans serialised")
            self._check(worker_pb2.RunRequest.FromString(blob).plan, watch)
            answer = worker_pb2.RunResponse(result=no_result(plan)).SerializeToString()
            watch.lap("nothing computed")
            result = worker_pb2.RunResponse.FromString(answer).result
            watch.lap("results parsed")
            events += self._batcher.apply(result)
            watch.lap("results applied")
        del watch.seconds["nothing computed"]
        (found,) = (event for event in events if isinstance(event, ScoreResult))
        return found

    def _check(self, plan: worker_pb2.StepPlan, watch: _Stopwatch) -> None:
        """What the worker does of a plan before it launches anything."""
        step = decode_step(plan, self._limits)
        watch.lap("worker checks plans")
        plan_readout(step)
        for candidate in candidates(step):
            signature(step.layout, candidate)
            group(step, candidate.phase, candidate.segments)
        watch.lap("worker groups rows")


def _request(workload: ScoreWorkload) -> inference_pb2.ScoreRequest:
    packed = pack(list(workload.items))
    return inference_pb2.ScoreRequest(
        contexts=[inference_pb2.Context(tokens=token_blob(workload.prefix))],
        item_tokens=inference_pb2.PackedTokens(
            tokens=token_blob(packed.tokens), offsets=packed.indptr.tolist()
        ),
        label_probabilities=inference_pb2.LabelProbabilities(label_token_ids=workload.label_ids),
    )


def no_result(plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
    ids, gathers = len(plan.gather_ids) // 4, len(plan.gather_rows) // 4
    return worker_pb2.StepResult(
        step_id=plan.step_id,
        gather_logprobs=np.full(ids, -1.0, np.float32).tobytes(),
        gather_argmax=np.zeros(gathers, np.int32).tobytes(),
        step_seconds=0.001,
    )
