"""Talk to one worker: its facts, a stream of steps, and predictions."""

import logging
import threading
import time
from collections.abc import Callable

import grpc

from stemserve.proto.v1 import worker_pb2, worker_pb2_grpc
from stemserve.service.request import WorkerFacts
from stemserve.service.workers.step_streams import (
    OnEnd,
    OnResult,
    RpcStream,
    SocketStream,
    StepStream,
    explained,
)
from stemserve.step_link import step_socket

UNLIMITED = -1  # a plan is as large as the biases and bans of a call; batching bounds it
_POLL_S = 0.1
REPORT_S = 10.0
_PROBE_S = 1.0
_OPTIONS = (
    ("grpc.max_send_message_length", UNLIMITED),
    ("grpc.max_receive_message_length", UNLIMITED),
    # A worker that is still loading refuses connections: look again soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A worker's host may vanish without a word.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # else a minute, whatever the line above says
    # Each client has a connection of its own: a restarted worker must not be taken for a dead one.
    ("grpc.use_local_subchannel_pool", 1),
    # A worker that comes back may have a new address behind its name.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
)

_log = logging.getLogger(__name__)


class WorkerUnreachable(Exception):
    """The worker did not describe itself."""


class WorkerClient:
    """One connection to one worker. Results come on a thread of their own."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        """`credentials` None: plaintext."""
        self.address = address
        self._credentials = credentials
        self._connect()
        self._lock = threading.Lock()  # of who replaces or gives up the channel
        self._closed = threading.Event()
        self._has_step_socket = False
        self._steps: StepStream | None = None

    def _connect(self) -> None:
        if self._credentials is None:
            self._channel = grpc.insecure_channel(self.address, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(self.address, self._credentials, options=_OPTIONS)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)

    def describe(self, *, timeout_s: float, give_up: Callable[[], str | None]) -> WorkerFacts:
        """Wait until the worker is ready. `give_up` is asked often; it says why to stop waiting."""
        until = time.monotonic() + timeout_s
        call = self._ask(timeout_s)
        report_at = time.monotonic() + REPORT_S
        while True:
            if report_at <= time.monotonic() < until:
                report_at += REPORT_S
                _log.info("worker %s does not answer yet: %s", self.address, self._probe())
                call = self._ask_anew(call, until - time.monotonic())
            try:
                described = call.result(timeout=_POLL_S)
            except grpc.FutureTimeoutError:
                reason = "the connection was closed" if self._closed.is_set() else give_up()
                if reason is not None:
                    call.cancel()
                    raise WorkerUnreachable(reason) from None
            except grpc.FutureCancelledError as error:
                raise WorkerUnreachable("the connection was closed") from error
            except grpc.RpcError as error:
                reason = give_up() or f"{_explain(self.address, error)}; {self._probe()}"
                raise WorkerUnreachable(reason) from error
            else:
                self._has_step_socket = described.step_socket
                return _facts(described)

    def _ask(self, timeout_s: float) -> "grpc.Future[worker_pb2.DescribeResponse]":
        return self._stub.Describe.future(
            worker_pb2.DescribeRequest(), timeout=timeout_s, wait_for_ready=True
        )

    def _ask_anew(
        self, call: "grpc.Future[worker_pb2.DescribeResponse]", timeout_s: float
    ) -> "grpc.Future[worker_pb2.DescribeResponse]":
        """Over a new channel: one looks for a name that is not there at ever longer intervals, up
        to two minutes, and a worker's name may come long after its server."""
        with self._lock:
            if call.done() or self._closed.is_set():
                return call
            call.cancel()
            self._channel.close()
            self._connect()
            return self._ask(timeout_s)

    def open(self, *, on_result: OnResult, on_lost: OnEnd) -> None:
        """Start the stream of steps. The callbacks run on its thread, `on_lost` once."""

        def end(reason: str) -> None:
            if not self._closed.is_set():
                reason = f"worker {self.address}: {reason}"
                _log.warning("lost the worker: %s", reason)
                on_lost(reason)

        try:
            self._steps = self._stream()
        except OSError as error:
            end(f"no plans can be sent to it: {error}")
        else:
            self._steps.open(on_result, end)

    def _stream(self) -> StepStream:
        """Raises OSError."""
        if self._has_step_socket:
            return SocketStream(step_socket(_unix_path(self.address)))
        return RpcStream(self._stub)

    def send(self, plan: worker_pb2.StepPlan) -> None:
        if self._steps is None:
            raise RuntimeError("no stream of steps is open")
        self._steps.send(plan)

    def predict(self, plan: worker_pb2.StepPlan, *, timeout_s: float) -> worker_pb2.PredictResponse:
        return self._stub.Predict(worker_pb2.PredictRequest(plan=plan), timeout=timeout_s)

    def close(self) -> None:
        """End the stream and the connection; may be called twice, not from the reader thread."""
        with self._lock:  # no other channel is opened afterwards
            self._closed.set()
        if self._steps is not None:
            self._steps.close()
        self._channel.close()

    def _probe(self) -> str:
        """What a call hears that does not wait until the worker is ready."""
        try:
            self._stub.Describe(worker_pb2.DescribeRequest(), timeout=_PROBE_S)
        except grpc.RpcError as error:
            return _explain(self.address, error)
        except ValueError:  # so gRPC says it
            return "the connection was closed"
        return "it answers now"


def _explain(address: str, error: grpc.RpcError) -> str:
    return f"worker {address}: {explained(error)}"


def _unix_path(address: str) -> str:
    """As gRPC understands it: unix:path or unix:///path."""
    return address.removeprefix("unix:").removeprefix("//")


def _facts(described: worker_pb2.DescribeResponse) -> WorkerFacts:
    return WorkerFacts(
        model=described.model,
        architecture=described.architecture,
        dtype=described.dtype,
        device=described.device,
        vocab_size=described.vocab_size,
        context_tokens=described.context_tokens,
        layers=described.layers,
        query_heads=described.query_heads,
        kv_heads=described.kv_heads,
        head_dim=described.head_dim,
        page_size=described.page_size,
        kv_pages=described.kv_pages,
        sampler_slots=described.sampler_slots,
        steps_in_flight=described.steps_in_flight,
        has_lm_head=described.has_lm_head,
        class_labels=tuple(described.class_labels),
        kv_bytes_per_token=described.kv_bytes_per_token,
        kv_dtype=described.kv_dtype,
        max_burst_steps=max(1, described.max_burst_steps),
        deterministic=described.deterministic,
        cost_table_json=described.cost_table_json,
        torch_version=described.torch_version,
        cuda_version=described.cuda_version,
    )
