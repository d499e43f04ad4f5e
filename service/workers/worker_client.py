"""Talk to one worker: its facts, a stream of steps, and predictions."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import grpc

from stemserve.proto.v1 import worker_pb2, worker_pb2_grpc
from stemserve.service.request import WorkerFacts

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
        self._plans: SimpleQueue[worker_pb2.StepPlan | None] = SimpleQueue()
        self._closed = threading.Event()
        self._reader: threading.Thread | None = None
        self._run: grpc.Call | None = None

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
                return _facts(call.result(timeout=_POLL_S))
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

    def _ask(self, timeout_s: float) -> "grpc.Future[worker_pb2.DescribeResponse]":
        return self._stub.Describe.future(
            worker_pb2.DescribeRequest(), timeout=timeout_s, wait_for_ready=True
        )

    def _ask_anew(
        self, call: "grpc.Future[worker_pb2.DescribeResponse]", timeout_s: float
    ) -> "grpc.Future[worker_pb2.DescribeResponse]":
        """Over a new channel: one looks for a name that is not there at ever longer intervals, up
        to two minutes, and a worker's name may come long after its server."""
        if call.done() or self._closed.is_set():
            return call
        call.cancel()
        self._channel.close()
        self._connect()
        return self._ask(timeout_s)

    def open(
        self,
        *,
        on_result: Callable[[worker_pb2.StepResult], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Start the stream of steps. The callbacks run on the reader thread, `on_lost` once."""
        run = self._stub.Run(self._requests())
        self._run = run
        self._reader = threading.Thread(
            target=self._read, args=(run, on_result, on_lost), name="worker-results"
        )
        self._reader.start()

    def send(self, plan: worker_pb2.StepPlan) -> None:
        self._plans.put(plan)

    def predict(self, plan: worker_pb2.StepPlan, *, timeout_s: float) -> worker_pb2.PredictResponse:
        return self._stub.Predict(worker_pb2.PredictRequest(plan=plan), timeout=timeout_s)

    def close(self) -> None:
        """End the stream and the connection; may be called twice, not from the reader thread."""
        self._closed.set()
        self._plans.put(None)
        if self._run is not None:
            self._run.cancel()
        if self._reader is not None:
            self._reader.join()
        self._channel.close()

    def _probe(self) -> str:
        """What a call hears that does not wait until the worker is ready."""
        try:
            self._stub.Describe(worker_pb2.DescribeRequest(), timeout=_PROBE_S)
        except grpc.RpcError as error:
            return _explain(self.address, error)
        return "it answers now"

    def _requests(self) -> Iterator[worker_pb2.RunRequest]:
        while (plan := self._plans.get()) is not None:
            yield worker_pb2.RunRequest(plan=plan)

    def _read(
        self,
        run: Iterator[worker_pb2.RunResponse],
        on_result: Callable[[worker_pb2.StepResult], None],
        on_lost: Callable[[str], None],
    ) -> None:
        reason = f"worker {self.address} ended its stream"
        try:
            for response in run:
                on_result(response.result)
        except grpc.RpcError as error:
            reason = _explain(self.address, error)
        if not self._closed.is_set():
            self._plans.put(None)
            _log.warning("lost the worker: %s", reason)
            on_lost(reason)


def _explain(address: str, error: grpc.RpcError) -> str:
    # The sync stub raises errors that are calls too; the stubs do not say so.
    code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    return f"worker {address}: {code}: {details}"


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
