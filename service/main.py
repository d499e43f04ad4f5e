"""Build every object of a server, serve until SIGTERM, then drain."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry, ProcessCollector

import stemserve
from stemserve.leaving import leaves_quietly
from stemserve.service.batching.batcher import Batcher, BatcherLimits
from stemserve.service.batching.queue.admission import TenantShare
from stemserve.service.batching.samples.speculation import DraftPolicy
from stemserve.service.calls.admin_servicer import AdminServicer
from stemserve.service.calls.services import SERVICES, CallThreads, Services
from stemserve.service.config.server import ServerConfig, ServiceConfig
from stemserve.service.constraints.compile_queue import CompileQueue
from stemserve.service.metrics.call_metrics import Metrics
from stemserve.service.metrics.instruments import BeforeScrape
from stemserve.service.request import WorkerFacts
from stemserve.service.serving.admin_port import admin_port
from stemserve.service.serving.authentication import authentication
from stemserve.service.serving.background import run_until_closed
from stemserve.service.serving.call_gate import CallGate
from stemserve.service.serving.call_status import CallStatus
from stemserve.service.serving.call_watch import CallWatch
from stemserve.service.serving.garbage import collect_when_idle, put_off_full_collections
from stemserve.service.serving.health import Health
from stemserve.service.serving.heap import keep_freed_memory
from stemserve.service.serving.metrics_port import metrics_port, wait_for_notes
from stemserve.service.serving.server import BoundPorts, Servers
from stemserve.service.serving.stop_signals import Stopped, StopSignals
from stemserve.service.serving.tls import server_credentials
from stemserve.service.text.tokenizer import Tokenizer
from stemserve.service.tracing.traced_batcher import TracedBatcher
from stemserve.service.tracing.tracing import tracing
from stemserve.service.workers.mask_threads import MaskThreads
from stemserve.service.workers.remote_worker import RemoteWorker
from stemserve.service.workers.step_commands import Inbox
from stemserve.service.workers.step_loop import StepLoop
from stemserve.service.workers.step_monitor import watch_step_loop
from stemserve.service.workers.threaded_engine import ThreadedEngine
from stemserve.service.workers.watchdog import StepTimeout
from stemserve.service.workers.worker_client import WorkerUnreachable
from stemserve.service.workers.worker_process import WorkerProcess
from stemserve.service.workers.worker_supervisor import (
    RestartPolicy,
    WorkerHost,
    WorkerSupervisor,
)

TOKENIZER_THREADS = 2
LONG_TEXT_THREADS = 1
COMPILE_THREADS = 1
SWITCH_INTERVAL_S = 0.001
_DRAIN_POLL_S = 0.02

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a server says when it can be called."""

    facts: WorkerFacts
    ports: BoundPorts
    metrics_port: int
    admin_port: int | None


class _Core:
    """The objects between the RPC loop and the worker."""

    def __init__(self, config: ServiceConfig, launch: Callable[[], WorkerHost]) -> None:
        limits = _batcher_limits(config)

        def make_batcher(facts: WorkerFacts) -> Batcher:
            rows = config.limits.on(facts.device).max_step_tokens
            make = TracedBatcher if config.tracing.enabled else Batcher
            of_device = replace(limits, max_step_tokens=rows)
            return make(facts, of_device, clock=time.monotonic, run_aside=self.masks.run)

        registry = CollectorRegistry()
        inbox = Inbox()
        self.registry = registry
        registry.register(BeforeScrape(partial(wait_for_notes, asyncio.get_running_loop())))
        registry.register(BeforeScrape(lambda: self.step_loop.observe_results()))
        self.drain_ends_s = 0.0  # monotonic; 0: no drain has begun
        ProcessCollector(registry=registry)
        self.metrics = Metrics(registry, tuple(config.tenants))
        self.masks = MaskThreads(inbox, note=self.metrics.masks_made)
        self.health = Health(SERVICES, note_serving=self.metrics.ready)
        self.engine = ThreadedEngine(
            inbox,
            max_unread_tokens=config.limits.max_unread_tokens,
            max_stream_delay_s=config.server.max_stream_delay_ms / 1e3,
            note_lost=self.metrics.delivery_failed,
        )
        self.step_loop = StepLoop(
            inbox,
            make_batcher=make_batcher,
            observe=self.metrics.observe_step,
            step_timeout=StepTimeout(
                least_s=config.worker.step_timeout_least_s, most_s=config.worker.step_timeout_s
            ),
        )
        self.supervisor = WorkerSupervisor(
            launch,
            inbox=inbox,
            engine=self.engine,
            health=self.health,
            metrics=self.metrics,
            policy=RestartPolicy(startup_timeout_s=config.worker.start_timeout_s),
        )

    def start(self, stack: AsyncExitStack) -> None:
        """The stack ends the worker, then the step loop, then the threads that make masks."""
        stack.enter_context(self.masks)
        self.step_loop.start(deliver=self.engine.deliver, worker_lost=self.supervisor.worker_lost)
        stack.callback(self.step_loop.stop)
        stack.push_async_callback(self.supervisor.close)


def _batcher_limits(config: ServiceConfig) -> BatcherLimits:
    return BatcherLimits(
        max_queued_requests=config.limits.max_queued_requests,
        max_queued_tokens=config.limits.max_queued_tokens,
        max_queued_s=config.limits.max_queued_ms / 1e3,
        max_burst_s=config.worker.max_burst_ms / 1e3,
        drafts=DraftPolicy(
            default_tokens=config.speculation.draft_tokens,
            least_gain=config.speculation.least_gain,
        ),
        tenants={
            name: TenantShare(
                weight=tenant.weight,
                requests_per_second=tenant.requests_per_second,
                tokens_per_second=tenant.tokens_per_second,
            )
            for name, tenant in config.tenants.items()
        },
    )


def run(
    config: ServiceConfig, model: Path, tokenizer: Tokenizer, *, announce: Callable[[Ready], None]
) -> None:
    """Returns after a drain. Raises ConfigError, PortInUse, or WorkerUnreachable."""
    # The step loop's thread must not wait 5 ms (the default) for a busy RPC loop.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    with leaves_quietly(), suppress(Stopped):  # until the signals are watched
        uvloop.run(serve(config, model, tokenizer, announce=announce))


async def serve(
    config: ServiceConfig, model: Path, tokenizer: Tokenizer, *, announce: Callable[[Ready], None]
) -> None:
    core = _Core(config, _launcher(config, model))
    weights = {name: tenant.weight for name, tenant in config.tenants.items()}
    gate = CallGate(max_calls=config.limits.max_concurrent_calls, weights=weights)
    async with AsyncExitStack() as stack:
        signals = await stack.enter_async_context(StopSignals.watched(core.supervisor.kill))
        tracer = stack.enter_context(tracing(config, core.metrics, lambda: core.drain_ends_s))
        watch = CallWatch(tracer, log_calls=config.log_calls)
        call_status = CallStatus(
            core.metrics, default_deadline_s=config.server.default_deadline_s, watch=watch
        )
        servers = _servers(core, config, call_status, gate)
        port = stack.enter_context(metrics_port(config.server, core.registry))
        core.start(stack)
        # Closed once the servers have cut what the drain left: calls in between need them.
        threads = stack.enter_context(_call_threads(weights))
        await stack.enter_async_context(servers.running())
        facts = await signals.unless_stopped(core.supervisor.start())
        core.metrics.describe(facts, stemserve.__version__)
        if tracer is not None:
            tracer.model = facts.model
        services = Services(
            core.engine,
            tokenizer=tokenizer,
            threads=threads,
            limits=config.limits,
            metrics=core.metrics,
            watch=watch,
        )
        await services.prepare()
        services.add_to(servers.rpc)
        admin_servicer = AdminServicer(core.engine, drain=signals.ask)
        admin = await stack.enter_async_context(_admin_port(config, admin_servicer, call_status))
        gate.open()
        core.health.open()
        put_off_full_collections()
        announce(Ready(facts=facts, ports=servers.ports, metrics_port=port, admin_port=admin))
        run_until_closed(stack, services.keep())
        run_until_closed(stack, collect_when_idle(lambda: not core.engine.running_jobs))
        await _until_drained(core, signals, gate, config.server)


@contextmanager
def _call_threads(weights: Mapping[str, float]) -> Generator[CallThreads]:
    with (
        ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer") as short,
        ThreadPoolExecutor(LONG_TEXT_THREADS, "long-text") as long,
        ThreadPoolExecutor(COMPILE_THREADS, "compile") as compiling,
    ):
        queue = CompileQueue(compiling, threads=COMPILE_THREADS, weights=weights)
        yield CallThreads(short=short, long=long, compile_queue=queue)


def _servers(
    core: _Core, config: ServiceConfig, call_status: CallStatus, gate: CallGate
) -> Servers:
    servers = Servers(
        config.server,
        limits=config.limits,
        health=core.health,
        interceptors=[
            call_status,
            *authentication(config.auth, config.tenants, core.metrics),
            gate,
        ],
        credentials=server_credentials(config.tls),
    )
    servers.reflect(SERVICES)
    return servers


def _admin_port(
    config: ServiceConfig, servicer: AdminServicer, call_status: CallStatus
) -> AbstractAsyncContextManager[int | None]:
    return admin_port(
        config.server, servicer.add_to, limits=config.limits, interceptors=[call_status]
    )


async def _until_drained(
    core: _Core, signals: StopSignals, gate: CallGate, config: ServerConfig
) -> None:
    """Raises WorkerUnreachable, after a drain too, if the worker is lost for good."""
    failures: list[WorkerUnreachable] = []

    async def supervise() -> None:
        try:
            await core.supervisor.supervise()
        except WorkerUnreachable as error:
            failures.append(error)
            signals.ask()

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(
            watch_step_loop(core.engine, core.health, core.metrics.observe_load)
        )
        supervising = tasks.create_task(supervise())
        await signals.wait()
        core.health.drain()
        await asyncio.sleep(config.drain_delay_s)
        core.drain_ends_s = time.monotonic() + config.drain_s
        await _drain(core, gate, config.drain_s)
        supervising.cancel()
        watching.cancel()
    for failure in failures:
        raise failure


async def _drain(core: _Core, gate: CallGate, drain_s: float) -> None:
    gate.drain()
    with suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            await gate.wait_idle()
            core.engine.drain()  # for calls on streams that stay open
            while core.engine.running_jobs:
                await asyncio.sleep(_DRAIN_POLL_S)
    _log.info("drained; %d calls and %d jobs are cut", gate.running_calls, core.engine.running_jobs)
    gate.cut()


def _launcher(config: ServiceConfig, model: Path) -> Callable[[], WorkerHost]:
    address = config.worker.address
    if address is not None:
        return lambda: RemoteWorker(address, config.worker)
    command = config.worker.command(
        model,
        max_step_tokens=config.limits.max_step_tokens,
        log_level=config.log_level,
        log_format=config.log_format,
    )
    return lambda: WorkerProcess(command)
