"""A batcher, a literal worker, and the steps between them."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.service.literal_worker import PAGE, LiteralWorker
from tests.service.toy_model import VOCAB

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.batcher import Batcher, BatcherLimits
from stemserve.service.batching.mask_work import Run
from stemserve.service.batching.queue.admission import TenantShare
from stemserve.service.batching.samples.speculation import DraftPolicy
from stemserve.service.request import (
    Event,
    GenerateChunk,
    Job,
    JobFailed,
    ScorePart,
    ScoreResult,
    StopCause,
    WorkerFacts,
)


@dataclass
class Answer:
    """All that a job was answered."""

    result: ScoreResult | None = None
    parts: list[ScorePart] = field(default_factory=list[ScorePart])
    error: Exception | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    finish: dict[int, str] = field(default_factory=dict[int, str])
    last: GenerateChunk | None = None
    num_events: int = 0


@dataclass
class Rig:
    """A batcher, its worker, and the steps between them."""

    batcher: Batcher
    worker: LiteralWorker
    steps_in_flight: int
    plans: list[worker_pb2.StepPlan] = field(default_factory=list[worker_pb2.StepPlan])
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    now: float = 0.0
    late: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])

    def __post_init__(self) -> None:
        self.in_flight: deque[worker_pb2.StepPlan] = deque()

    def submit(self, *jobs: Job) -> None:
        for job in jobs:
            self.batcher.submit(job)
            self.answers[job.request_id] = Answer()

    def plan(self) -> worker_pb2.StepPlan | None:
        plan = self.batcher.plan_step()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(plan)
        self.take(self.batcher.take_events())
        return plan

    def answer(self, error: str = "") -> None:
        """Run the oldest step in flight; with an error it computes nothing."""
        plan = self.in_flight.popleft()
        if error:
            self.worker.trusting_from = self.plans[-1].step_id + 1
            result = worker_pb2.StepResult(step_id=plan.step_id, error=error)
        else:
            result = self.worker.run(plan)
        self.take(self.batcher.apply(result))

    def turn(self) -> bool:
        """Fill the steps in flight, answer one; whether anything was done."""
        while len(self.in_flight) < self.steps_in_flight and self.plan() is not None:
            pass
        if self.in_flight:
            self.answer()
        elif self.late:
            self.make_masks()
        else:
            return False
        return True

    def make_masks(self) -> None:
        """That are the first to be made, of those that take long."""
        self.late.popleft()()

    def run(self, *jobs: Job) -> list[Answer]:
        """Until nothing is left to do; the answers of these jobs."""
        self.submit(*jobs)
        turns = 0
        while self.turn():
            turns += 1
            assert turns < 20_000, "the batcher does not come to an end"
        return [self.answers[job.request_id] for job in jobs]

    def take(self, events: list[Event]) -> None:
        for event in events:
            answer = self.answers[event.request_id]
            assert answer.result is None and answer.error is None and answer.last is None
            answer.num_events += 1
            match event:
                case ScoreResult():
                    answer.result = event
                case ScorePart():
                    answer.parts.append(event)
                case JobFailed():
                    answer.error = event.error
                case GenerateChunk():
                    for news in event.news:
                        assert news.sample not in answer.finish
                        assert len(news.token_ids) or news.finish is StopCause.COMPLETE
                        assert len(news.logprobs) == len(news.token_ids)
                        answer.tokens.setdefault(news.sample, []).extend(news.token_ids)
                        if news.finish is not None:
                            answer.finish[news.sample] = news.finish
                    if event.usage is not None:
                        answer.last = event


def putting_off(late: deque[Callable[[], None]]) -> Run:
    def put_off(work: Callable[[], None], *, slow: bool) -> None:
        late.append(work)

    return put_off


def make_rig(
    *,
    pages: int = 64,
    budget: int = 64,
    slots: int = 8,
    in_flight: int = 2,
    tenants: Mapping[str, TenantShare] | None = None,
    max_queued_requests: int = 1024,
    max_queued_tokens: int = 1 << 20,
    max_queued_s: float = 600.0,
    burst: int = 1,
    max_burst_s: float = 10.0,
    drafts: DraftPolicy | None = None,
) -> Rig:
    facts = _toy_facts(pages=pages, slots=slots, in_flight=in_flight, burst=burst)
    bounds = BatcherLimits(
        max_step_tokens=budget,
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        max_queued_s=max_queued_s,
        max_burst_s=max_burst_s,
        tenants=tenants or {},
        drafts=drafts or DraftPolicy(),
    )
    rig: Rig
    late = deque[Callable[[], None]]()

    def clock() -> float:
        return rig.now

    batcher = Batcher(facts, bounds, clock=clock, run_aside=putting_off(late))
    rig = Rig(batcher, LiteralWorker(pages, budget), in_flight, late=late)
    return rig


def _toy_facts(*, pages: int, slots: int, in_flight: int, burst: int) -> WorkerFacts:
    return WorkerFacts(
        model="toy",
        architecture="toy",
        dtype="float32",
        device="cpu",
        vocab_size=VOCAB,
        context_tokens=1 << 20,
        layers=1,
        query_heads=1,
        kv_heads=1,
        head_dim=1,
        page_size=PAGE,
        kv_pages=pages,
        sampler_slots=slots,
        steps_in_flight=in_flight,
        has_lm_head=True,
        class_labels=tuple("abc"),
        max_burst_steps=burst,
        kv_bytes_per_token=8,
    )
