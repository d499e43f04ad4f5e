"""The worker process: load, serve, end."""

import logging
import os
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import torch

from stemserve.json_log import log_to_stderr
from stemserve.leaving import INTERRUPTED
from stemserve.proto.v1 import worker_pb2_grpc
from stemserve.step_link import step_socket
from stemserve.worker.calibrate import calibrate
from stemserve.worker.capacity.command import capacity
from stemserve.worker.choice.probed_runner import ProbedRunner
from stemserve.worker.config import PROGRAM, ConfigError, WorkerConfig, parse_config
from stemserve.worker.garbage import GarbageClock, leave_out_what_lives
from stemserve.worker.health import WorkerHealth, health_port
from stemserve.worker.late_compiles import LateCompiles
from stemserve.worker.lifetime import Lifetime, Stopped
from stemserve.worker.models.errors import ModelError
from stemserve.worker.models.weights import Progress
from stemserve.worker.plan_streams import PlanStreams, StreamTaken, WorkerStops
from stemserve.worker.servicer import WorkerServicer
from stemserve.worker.stall_clock import StallClock
from stemserve.worker.start import Parts, make_parts
from stemserve.worker.step_socket import StepSocket
from stemserve.worker.step_thread import StepThread
from stemserve.worker.steps.slow_launches import WatchedRunner

log = logging.getLogger("stemserve.worker")

EXIT_CANNOT_START = 2
RPC_THREADS = 8  # one is held by the Run stream
STOP_GRACE_S = 5.0
PROGRESS_EVERY_S = 2.0
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
UNLIMITED = -1  # the service bounds its plans
OPTIONS = (
    ("grpc.max_receive_message_length", UNLIMITED),
    ("grpc.max_send_message_length", UNLIMITED),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server on it
    # A service's host may vanish without a word; its stream must not keep others out.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else a minute, whatever the line above says
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # a step may take long
)


def main(arguments: Sequence[str], *, program: str = PROGRAM) -> int:
    """`program`: the name in the help."""
    log_to_stderr(level="info", form="text", process="worker")
    try:
        if list(arguments[:1]) == ["calibrate"]:
            return calibrate(arguments[1:])
        if list(arguments[:1]) == ["capacity"]:
            return capacity(arguments[1:])
        config = parse_config(arguments, program=program)
        log_to_stderr(level=config.log_level, form=config.log_format, process="worker")
        with Lifetime.watched(config.parent_fd) as lifetime:
            clock = StallClock()
            health = WorkerHealth(clock.longest_s, step_timeout_s=config.step_timeout_s)
            with health_port(config.health_listen, health):
                return _run(config, lifetime, clock, health)
    except Stopped:
        log.info("told to end before serving")
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ConfigError, ModelError, MemoryError, OSError) as error:
        # The message in one line: the service shows the last line of its worker.
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"stemserve.worker: error: {text}", file=sys.stderr)
        return EXIT_CANNOT_START


def _run(config: WorkerConfig, lifetime: Lifetime, clock: StallClock, health: WorkerHealth) -> int:
    started = time.perf_counter()
    log.info("loading %s", config.model)
    parts = make_parts(config, _progress(lifetime), lifetime.check)
    facts = parts.facts
    log.info(
        "%s (%s, %s on %s) is ready after %.1f s",
        facts.model,
        facts.architecture,
        facts.dtype,
        facts.device,
        time.perf_counter() - started,
    )
    lifetime.check()
    if facts.device == "cuda":
        LateCompiles().watch()
    leave_out_what_lives()
    with _serving(parts, config, lifetime, clock):
        log.info("serving on %s", config.listen)
        health.set_serving(True)
        code = lifetime.wait()
        health.set_serving(False)
        log.info("ending")
    return code


def _progress(lifetime: Lifetime) -> Progress:
    """Logs from time to time, and stops the loading when the worker is told to end."""
    last = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal last
        lifetime.check()
        now = time.perf_counter()
        if now - last >= PROGRESS_EVERY_S or done == total:
            last = now
            log.info("loaded %d of %d million weights", done // 10**6, total // 10**6)

    return progress


@contextmanager
def _serving(
    parts: Parts, config: WorkerConfig, lifetime: Lifetime, clock: StallClock
) -> Generator[None]:
    with (
        ThreadPoolExecutor(RPC_THREADS, "rpc") as threads,
        _step_thread(parts, lifetime, clock) as steps,
    ):
        server = grpc.server(threads, options=OPTIONS)
        streams = PlanStreams(steps, clock)
        parts.facts.step_socket = config.unix_path is not None
        servicer = WorkerServicer(parts.facts, parts.runner, streams)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
        _bind(server, config)
        with _step_socket(config, streams) as socket:
            server.start()
            try:
                yield
            finally:
                stopped = server.stop(STOP_GRACE_S)
                streams.stop()
                stopped.wait()
                if socket is not None:
                    socket.stop(grace_s=STOP_GRACE_S)
                streams.join()


@contextmanager
def _step_socket(config: WorkerConfig, streams: PlanStreams) -> Generator[StepSocket | None]:
    """None over TCP. Raises ConfigError."""
    if config.unix_path is None:
        yield None
        return
    path = Path(step_socket(str(config.unix_path)))
    try:
        socket = StepSocket(path, streams.results, (StreamTaken, WorkerStops))
    except OSError as error:
        raise ConfigError(f"--listen {config.listen}: cannot listen on {path} ({error})") from error
    with socket:
        yield socket


def _step_thread(parts: Parts, lifetime: Lifetime, clock: StallClock) -> StepThread:
    runner, prober = parts.runner, parts.prober
    if not runner.uses_gpu:  # where a launch is the step
        stepped = runner if prober is None else ProbedRunner(runner, prober)
        return StepThread(stepped, lifetime.lose_device, clock=clock, prober=prober)
    garbage = GarbageClock()
    garbage.watch()
    watched = WatchedRunner(runner, torch.device("cuda"), garbage)
    return StepThread(watched, lifetime.lose_device, clock=clock)


def _bind(server: grpc.Server, config: WorkerConfig) -> None:
    open_to_network = config.unix_path is None and _host(config) not in LOOPBACK
    if open_to_network and config.tls is None:
        log.warning("%s is open to the network: no TLS, no authentication", config.listen)
    elif open_to_network and config.tls is not None and config.tls.client_ca is None:
        log.warning("%s takes any service; --tls-client-ca demands a certificate", config.listen)
    before = os.umask(0o177)  # the socket of a Unix address gets mode 0600
    try:
        if config.tls is None:
            server.add_insecure_port(config.listen)
        else:
            server.add_secure_port(config.listen, config.tls.credentials())
    except RuntimeError as error:
        raise ConfigError(f"--listen {config.listen}: cannot bind ({error})") from error
    finally:
        os.umask(before)


def _host(config: WorkerConfig) -> str:
    return config.listen.rpartition(":")[0]
