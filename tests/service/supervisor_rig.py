"""Engine, step loop, batcher and supervisor over real worker processes that compute nothing."""

import asyncio
import os
import signal
import time
from itertools import count

import numpy as np

from stemserve.service.batching.batcher import Batcher, BatcherLimits
from stemserve.service.request import (
    GenerateChunk,
    GenerateJob,
    SamplerSpec,
    ScoreJob,
    WorkerFacts,
)
from stemserve.service.serving.health import Health
from stemserve.service.stream_pace import StreamPace
from stemserve.service.workers.step_commands import Inbox
from stemserve.service.workers.step_loop import StepLoop
from stemserve.service.workers.threaded_engine import ThreadedEngine
from stemserve.service.workers.watchdog import StepTimeout
from stemserve.service.workers.worker_process import WorkerProcess
from stemserve.service.workers.worker_supervisor import RestartPolicy, WorkerHost, WorkerSupervisor

PATIENCE_S = 60.0
NUMBERS = count()
EMPTY = np.zeros(0, np.int32)


def score_job(*, items: int = 2, deadline: float | None = None) -> ScoreJob:
    units = np.arange(items, dtype=np.int32)
    indptr = np.arange(items + 1, dtype=np.int32)
    return ScoreJob(
        request_id=f"score-{next(NUMBERS)}",
        contexts=(np.arange(20, dtype=np.int32),),
        unit_tokens=units,
        unit_indptr=indptr,
        unit_context=np.zeros(items, np.int32),
        gather_unit=units,
        gather_offset=np.zeros(items, np.int32),
        gather_indptr=indptr,
        gather_ids=np.full(items, 7, np.int32),
        deadline=deadline,
    )


def generate_job(*, tokens: int = 8, samples: int = 1) -> GenerateJob:
    sampler = SamplerSpec(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        bias_ids=EMPTY,
        bias_values=np.zeros(0, np.float32),
        banned_ids=EMPTY,
        min_new_tokens=0,
        top_logprobs=0,
    )
    return GenerateJob(
        request_id=f"generate-{next(NUMBERS)}",
        prompt=np.arange(1, 6, dtype=np.int32),
        samplers=(sampler,) * samples,
        max_new_tokens=tokens,
        stop_ids=frozenset(),
    )


class Restarts:
    def __init__(self) -> None:
        self.count = 0

    def worker_up(self, up: bool) -> None:
        pass

    def worker_restarted(self, reason: str) -> None:
        self.count += 1

    def model_loaded(self, seconds: float) -> None:
        pass


class Rig:
    """All that is between the servicers and a worker."""

    def __init__(
        self,
        commands: list[list[str]],
        *,
        make_batcher: type[Batcher] = Batcher,
        max_failed_starts: int = 3,
    ) -> None:
        """The first worker is the first command, and so on; the last command is repeated."""
        inbox = Inbox()
        self._commands = commands
        self._supervising: asyncio.Task[None] | None = None
        self.hosts: list[WorkerProcess] = []
        self.restarts = Restarts()
        self.engine = ThreadedEngine(inbox)
        self.health = Health([], note_serving=lambda serving: None)
        self.health.open()
        self.step_loop = StepLoop(
            inbox,
            make_batcher=lambda facts: make_batcher(facts, BatcherLimits(), clock=time.monotonic),
            observe=lambda result, load: None,
            step_timeout=StepTimeout(least_s=PATIENCE_S, most_s=PATIENCE_S),
        )
        self.supervisor = WorkerSupervisor(
            self._launch,
            inbox=inbox,
            engine=self.engine,
            health=self.health,
            metrics=self.restarts,
            policy=RestartPolicy(first_delay_s=0.01, max_failed_starts=max_failed_starts),
        )

    def _launch(self) -> WorkerHost:
        self.hosts.append(WorkerProcess(self._commands[0]))
        if len(self._commands) > 1:
            del self._commands[0]
        return self.hosts[-1]

    async def __aenter__(self) -> "Rig":
        self.step_loop.start(deliver=self.engine.deliver, worker_lost=self.supervisor.worker_lost)
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait([self._supervising])
        await self.supervisor.close()
        self.step_loop.stop()

    async def run(self) -> WorkerFacts:
        return await self.supervisor.start()

    def supervise(self) -> None:
        self._supervising = asyncio.create_task(self.supervisor.supervise())

    async def until_serving(self, serving: bool) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.health.serving != serving:
                await asyncio.sleep(0.005)

    def kill_worker(self) -> None:
        os.kill(self.hosts[-1].pid, signal.SIGKILL)

    async def generate(self, job: GenerateJob) -> list[GenerateChunk]:
        return [chunk async for chunk in self.engine.generate(job, StreamPace())]
