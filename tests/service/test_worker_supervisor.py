"""Engine, step loop, batcher and supervisor over real worker processes that compute nothing."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.service.supervisor_rig import PATIENCE_S, Rig, generate_job, score_job

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.batcher import Batcher
from stemserve.service.errors import DeadlinePassed, EngineFault, NotReady
from stemserve.service.stream_pace import StreamPace
from stemserve.service.workers import threaded_engine
from stemserve.service.workers.worker_client import WorkerUnreachable

Command = Callable[..., list[str]]


class SlowBatcher(Batcher):
    """Takes 20 ms to plan a step."""

    def plan_step(self) -> worker_pb2.StepPlan | None:
        plan = super().plan_step()
        if plan is not None:
            time.sleep(0.02)
        return plan


class BrokenBatcher(Batcher):
    def plan_step(self) -> worker_pb2.StepPlan | None:
        if self.load().queued_requests:
            raise RuntimeError("a bug in the plan")
        return None


class NotingBatcher(Batcher):
    planners: ClassVar[list[str]] = []  # threads that planned a step

    def plan_step(self) -> worker_pb2.StepPlan | None:
        plan = super().plan_step()
        if plan is not None:
            self.planners.append(threading.current_thread().name)
        return plan


async def test_the_rpc_loop_plans_only_what_is_planned_at_once(
    fake_worker_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, planners = threading.current_thread().name, NotingBatcher.planners
    async with Rig([fake_worker_command()], make_batcher=NotingBatcher) as rig:
        await rig.run()
        planners.clear()
        await rig.engine.score(score_job())
        assert planners == [here]
        monkeypatch.setattr(threaded_engine, "FEW_CONTEXT_TOKENS", 19)
        await asyncio.sleep(0.1)  # so that no other thread has its turn
        await rig.engine.score(replace(score_job(), contexts=(np.arange(20, dtype=np.int32),)))
        many = replace(score_job(), contexts=(np.arange(20, dtype=np.int32),) * 10)
        await rig.engine.score(many)
        await rig.generate(generate_job(tokens=20))
        assert len(planners) > 21
        assert here not in planners[1:]


async def test_jobs_are_answered_in_the_sizes_they_asked_for(
    fake_worker_command: Command,
) -> None:
    async with Rig([fake_worker_command()]) as rig:
        with pytest.raises(NotReady, match="loading"):
            await rig.engine.score(score_job())
        await rig.run()
        scored, chunks = await asyncio.gather(
            rig.engine.score(score_job(items=5)), rig.generate(generate_job(tokens=6, samples=3))
        )
    assert scored.gather_logprobs.tolist() == [-1.0] * 5
    assert sum(chunk.num_tokens for chunk in chunks) == 18
    assert chunks[-1].usage is not None


async def test_a_worker_of_50_ms_is_never_idle_while_planning_takes_20_ms(
    fake_worker_command: Command, tmp_path: object
) -> None:
    log = f"{tmp_path}/steps"
    command = fake_worker_command("--step-seconds", 0.05, "--step-log", log)
    async with Rig([command], make_batcher=SlowBatcher) as rig:
        await rig.run()
        await rig.generate(generate_job(tokens=30))
    with open(log) as lines:
        starts = [float(line.split()[0]) for line in lines]
    between = np.diff(starts)
    assert len(between) >= 25
    # One step in flight would give 70 ms; the quantile leaves room for a busy machine.
    assert np.quantile(between, 0.3) <= 0.055


async def test_b55_a_worker_killed_in_mid_step_fails_its_calls_and_is_replaced(
    fake_worker_command: Command,
) -> None:
    commands = [fake_worker_command("--step-seconds", 0.5), fake_worker_command()]
    async with Rig(commands) as rig:
        await rig.run()
        rig.supervise()
        calls: list[asyncio.Future[Any]] = [
            asyncio.create_task(rig.generate(generate_job(tokens=1000))),
            asyncio.create_task(rig.engine.score(score_job(items=1000))),
        ]
        await asyncio.sleep(0.2)
        rig.kill_worker()
        failures: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(failure) for failure in failures] == [NotReady, NotReady]
        assert not rig.health.serving
        with pytest.raises(NotReady, match="is being restarted; retry"):
            await rig.engine.score(score_job())
        await rig.until_serving(True)
        assert (await rig.engine.score(score_job(items=3))).gather_logprobs.tolist() == [-1.0] * 3
        assert rig.restarts.count == 1


async def test_a_worker_that_dies_while_idle_is_replaced(fake_worker_command: Command) -> None:
    async with Rig([fake_worker_command()]) as rig:
        await rig.run()
        rig.supervise()
        rig.kill_worker()
        await rig.until_serving(False)
        await rig.until_serving(True)
        await rig.engine.score(score_job())


async def test_a_worker_that_cannot_start_says_why(fake_worker_command: Command) -> None:
    async with Rig([fake_worker_command("--exit-code", 7)]) as rig:
        with pytest.raises(WorkerUnreachable, match="ended with exit code 7"):
            await rig.run()


async def test_a_worker_whose_program_is_missing_says_so() -> None:
    async with Rig([["/nowhere/worker"]]) as rig:
        with pytest.raises(WorkerUnreachable, match="cannot be started: .*/nowhere/worker"):
            await rig.run()


async def test_restarts_end_after_the_allowed_failures(fake_worker_command: Command) -> None:
    commands = [fake_worker_command(), fake_worker_command("--exit-code", 7)]
    async with Rig(commands, max_failed_starts=2) as rig:
        await rig.run()
        rig.kill_worker()
        with pytest.raises(WorkerUnreachable, match="gave up after 2 failed starts"):
            await rig.supervisor.supervise()
        assert rig.restarts.count == 2


async def test_a_bug_in_the_plan_fails_the_calls_and_health(fake_worker_command: Command) -> None:
    async with Rig([fake_worker_command()], make_batcher=BrokenBatcher) as rig:
        await rig.run()
        with pytest.raises(EngineFault, match="a bug in the plan"):
            await rig.engine.score(score_job())
        assert not rig.health.serving


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_call_that_is_left_is_planned_no_more(
    fake_worker_command: Command, how: str
) -> None:
    async with Rig([fake_worker_command("--step-seconds", 0.01)]) as rig:
        await rig.run()
        stream = rig.engine.generate(generate_job(tokens=4000, samples=4), StreamPace())
        await anext(stream)
        if how == "closed":
            await stream.aclose()
        else:
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        async with asyncio.timeout(PATIENCE_S):
            # Its last steps may still be in flight, and their pages with them.
            while (load := await rig.engine.load()).running_requests or load.used_pages:
                await asyncio.sleep(0.01)
        assert rig.engine.running_jobs == 0


async def test_b51_a_deadline_ends_a_call_behind_a_long_step(fake_worker_command: Command) -> None:
    async with Rig([fake_worker_command("--step-seconds", 2.0)]) as rig:
        await rig.run()
        long = asyncio.create_task(rig.engine.score(score_job()))
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlinePassed):
            await rig.engine.score(score_job(deadline=time.monotonic() + 0.1))
        assert not long.done()
        await long


async def test_explain_asks_the_worker_and_runs_nothing(
    fake_worker_command: Command, tmp_path: object
) -> None:
    log = f"{tmp_path}/steps"
    async with Rig([fake_worker_command("--step-log", log)]) as rig:
        await rig.run()
        steps = await rig.engine.explain(score_job(items=4))
    assert [len(answer.groups) for _, answer, _ in steps] == [1] * len(steps)
    assert len(steps) >= 1
    assert not os.path.exists(log)


async def test_a_draining_engine_finishes_what_runs(fake_worker_command: Command) -> None:
    async with Rig([fake_worker_command("--step-seconds", 0.02)]) as rig:
        await rig.run()
        running = asyncio.create_task(rig.generate(generate_job(tokens=10)))
        await asyncio.sleep(0.05)
        rig.engine.drain()
        with pytest.raises(NotReady, match="shutting down"):
            await rig.engine.score(score_job())
        assert sum(chunk.num_tokens for chunk in await running) == 10
