"""One step of the model, from the plan to its result."""

import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.attention import PlannedGroup, StepAttention
from stemserve.worker.choice.dispatch import KERNEL_CODES, Choice, Dispatcher
from stemserve.worker.device_clock import DeviceClock
from stemserve.worker.forward import Forward
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.result import GroupCost, LaunchedStep, RanStep
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.scorer import Scorer, plan_readout
from stemserve.worker.steps.checks import StepLimits
from stemserve.worker.steps.step import Step, decode_step

TIMED_EVERY = 16  # steps on a GPU, where each timed layer records two events a group


class Decoder(Protocol):
    """Runs decode steps in a way of its own. Copies and samplers are dealt with before `run`."""

    fallbacks: Counter[str]  # decode steps that it ought to take and did not, by reason

    def takes(self, step: Step) -> bool: ...

    def run(self, step: Step) -> Sequence[RanStep]: ...  # [step.repeat], launched


class ModelRunner:
    """Runs steps one after the other; not to be shared by threads."""

    def __init__(
        self,
        forward: Forward,
        pool: KvPool,
        dispatcher: Dispatcher,
        sampler: Sampler,
        scorer: Scorer,
        limits: StepLimits,
        decoder: Decoder | None = None,
    ) -> None:
        self._forward = forward
        self._pool = pool
        self._dispatcher = dispatcher
        self._sampler = sampler
        self._scorer = scorer
        self._limits = limits
        self._decoder = decoder  # None: every step runs as any other
        self._clock = DeviceClock()
        self._steps = 0
        self._reported: Counter[tuple[str, str]] = Counter()  # fallbacks, by path and reason

    @property
    def uses_gpu(self) -> bool:
        return self._pool.device.type == "cuda"

    @property
    def num_classes(self) -> int:
        return self._limits.classes

    def step(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        return self.launch(plan).result()

    def decode(self, plan: worker_pb2.StepPlan) -> Step:
        """Raises BadPlan."""
        return decode_step(plan, self._limits)

    @torch.inference_mode()
    def launch(self, plan: worker_pb2.StepPlan) -> LaunchedStep:
        """Raises BadPlan before anything is changed; any error leaves the samplers' tokens as they
        were.
        """
        started = time.perf_counter()
        step = self.decode(plan)
        self._sampler.check(step)
        # A GPU copies while the step is planned.
        self._pool.copy(step.copies)
        if self._decoder is not None and self._decoder.takes(step):
            run = self._decoder.run
        else:
            run = partial(self._run_each, first=self._attention(step.at(0)))
        self._sampler.admit(step.samplers)
        self._sampler.mask(step.masks)
        began = self._clock.begin() if self.uses_gpu else None
        ran = run(step)
        self._sampler.end(step.samples)
        span = None if began is None else self._clock.end(began)
        return LaunchedStep(
            step=step, ran=ran, started=started, span=span, fallbacks=self._new_fallbacks()
        )

    def predict(self, plan: worker_pb2.StepPlan) -> worker_pb2.PredictResponse:
        """Safe beside a running step: it changes nothing but the dispatcher's memory of choices."""
        step = decode_step(plan, self._limits)
        choices = self._dispatcher.choose(step.at(0))
        return worker_pb2.PredictResponse(groups=[self._prediction(c) for c in choices])

    def _run_each(self, step: Step, first: StepAttention) -> Sequence[RanStep]:
        """One sub-step of a burst after the other; `first` is the attention of the first."""
        with self._sampler.kept_on_error(step.samples):
            ran = [self._run(step.at(0), first)]
            for number in range(1, step.repeat):
                sub_step = step.at(number)
                ran.append(self._run(sub_step, self._attention(sub_step)))
        return ran

    def _new_fallbacks(self) -> Counter[tuple[str, str]]:
        pieces = self._forward.fallbacks + self._dispatcher.slow_launches
        counts = Counter({("pieces", why): n for why, n in pieces.items()})
        if self._decoder is not None:
            counts.update({("decode_graph", why): n for why, n in self._decoder.fallbacks.items()})
        new, self._reported = counts - self._reported, counts
        return new

    def _attention(self, step: Step) -> StepAttention:
        choices = self._dispatcher.choose(step)
        return StepAttention(step, choices, self._pool, timed=self._is_timed())

    def _run(self, step: Step, attention: StepAttention) -> RanStep:
        readout = plan_readout(step)
        scores = self._forward.gather(step, attention, readout)
        if scores is None:
            hidden = self._forward(step, attention, readout)
            scores = self._scorer.read(step, readout, hidden).on_host()
        self._steps += 1
        return RanStep(
            step=step,
            readout=readout,
            scores=scores,
            groups=[self._cost(group) for group in attention.groups],
        )

    def _is_timed(self) -> bool:
        return not self.uses_gpu or self._steps % TIMED_EVERY == 0

    def _cost(self, planned: PlannedGroup) -> GroupCost:
        work = planned.work
        bytes_per_token = self._pool.shape.bytes_per_token
        one_by_one = planned.choice.group.kv_tokens_one_by_one
        # Only what was timed is compared with its prediction.
        seconds = self._dispatcher.cost(planned.choice, work).seconds if planned.is_timed else 0.0
        return GroupCost(
            planned=planned,
            predicted_seconds=seconds * self._pool.shape.layers,
            kv_read_bytes=work.kv_tokens_read * bytes_per_token,
            kv_avoided_bytes=max(0, one_by_one - work.kv_tokens_read) * bytes_per_token,
        )

    def _prediction(self, choice: Choice) -> worker_pb2.GroupPrediction:
        shape = self._pool.shape
        predictions = self._dispatcher.predict(choice.group)
        strategies: Sequence[worker_pb2.StrategyPrediction] = [
            worker_pb2.StrategyPrediction(
                kernel=KERNEL_CODES[p.kernel],
                predicted_seconds=p.seconds * shape.layers,
                host_seconds=p.cost.host_seconds * shape.layers,
                device_seconds=p.cost.device_seconds * shape.layers,
                kv_read_bytes=p.kv_tokens_read * shape.bytes_per_token,
                refusal=p.refusal or "",
            )
            for p in predictions
        ]
        read = next(p.kv_tokens_read for p in predictions if p.kernel == choice.strategy.kernel)
        avoided = max(0, choice.group.kv_tokens_one_by_one - read)
        return worker_pb2.GroupPrediction(
            phase=choice.group.phase,
            chosen=KERNEL_CODES[choice.strategy.kernel],
            reason=choice.reason,
            rows=choice.group.layout.num_rows,
            segments=choice.group.layout.num_segments,
            kv_avoided_bytes=avoided * shape.bytes_per_token,
            strategies=strategies,
        )
