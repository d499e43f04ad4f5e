"""A worker that computes nothing: it answers step plans of any shape after a settable delay.

Runs as `python tests/fake_worker.py --listen unix:/tmp/w.sock --step-seconds 0.05`.
"""

import argparse
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np

from stemserve.proto.v1 import inference_pb2, worker_pb2, worker_pb2_grpc
from stemserve.step_link import step_socket
from stemserve.worker.step_socket import StepSocket

UNLIMITED = -1


def count(blob: bytes) -> int:
    return len(blob) // 4


def filled(length: int, value: float, dtype: type[np.int32] | type[np.float32]) -> bytes:
    return np.full(length, value, dtype).tobytes()


def answer(
    plan: worker_pb2.StepPlan, *, classes: int, token: int, tops: dict[int, int]
) -> worker_pb2.StepResult:
    """Arrays of the right sizes: every sampled token is `token`, every log-probability -1.

    `tops` keeps how many likeliest tokens each sampler slot asks for.
    """
    tops.update({sampler.slot: sampler.top_logprobs for sampler in plan.samplers})
    wanted = [tops[slot] for slot in np.frombuffer(plan.sample_slots, "<i4").tolist()]
    repeat = max(1, plan.repeat)
    wanted *= repeat
    samples = count(plan.sample_rows) * repeat
    gathers = count(plan.gather_rows)
    rows = count(plan.token_ids)
    return worker_pb2.StepResult(
        step_id=plan.step_id,
        sampled_tokens=filled(samples, token, np.int32),
        sampled_logprobs=filled(samples, -1.0, np.float32),
        top_indptr=np.cumsum([0, *wanted], dtype=np.int32).tobytes() if any(wanted) else b"",
        top_ids=filled(sum(wanted), token, np.int32),
        top_logprobs=filled(sum(wanted), -1.0, np.float32),
        gather_logprobs=filled(count(plan.gather_ids), -1.0, np.float32),
        gather_argmax=filled(gathers, token, np.int32),
        class_scores=filled(count(plan.classify_rows) * classes, 0.0, np.float32),
        groups=[
            worker_pb2.GroupReport(
                phase="prefill",
                kernel=inference_pb2.KERNEL_CASCADE,
                reason="only",
                rows=rows,
                segments=count(plan.segment_kind),
            )
        ],
    )


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> worker_pb2.DescribeResponse:
        time.sleep(self._options.describe_seconds)
        return worker_pb2.DescribeResponse(
            model="fake",
            architecture="fake",
            dtype="float32",
            kv_dtype="float32",
            device="none",
            vocab_size=self._options.vocab_size,
            context_tokens=self._options.context_tokens,
            layers=2,
            query_heads=4,
            kv_heads=2,
            head_dim=16,
            page_size=16,
            kv_pages=self._options.kv_pages,
            sampler_slots=256,
            steps_in_flight=self._options.steps_in_flight,
            max_burst_steps=self._options.max_burst_steps,
            has_lm_head=True,
            class_labels=[f"class {i}" for i in range(self._options.classes)],
            kv_bytes_per_token=512,
            step_socket=self._options.unix_path is not None,
        )

    def Run(
        self, request_iterator: Iterator[worker_pb2.RunRequest], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.RunResponse]:
        for result in self.results(request.plan for request in request_iterator):
            yield worker_pb2.RunResponse(result=result)

    def results(
        self, plans: Iterator[worker_pb2.StepPlan], caller: object = None
    ) -> Generator[worker_pb2.StepResult]:
        tops = dict[int, int]()
        for number, plan in enumerate(plans, start=1):
            started = time.monotonic()
            if number == self._options.die_at_step:
                os.kill(os.getpid(), signal.SIGKILL)
            rows = count(plan.token_ids)
            seconds = self._options.step_seconds + rows * self._options.row_seconds
            if seconds:
                time.sleep(seconds * max(1, plan.repeat))
            result = answer(
                plan, classes=self._options.classes, token=self._options.token, tops=tops
            )
            result.step_seconds = time.monotonic() - started
            self._log(f"{started:.6f} {time.monotonic():.6f} {rows}")
            yield result

    def Predict(
        self, request: worker_pb2.PredictRequest, context: grpc.ServicerContext
    ) -> worker_pb2.PredictResponse:
        prediction = worker_pb2.StrategyPrediction(
            kernel=inference_pb2.KERNEL_CASCADE, predicted_seconds=0.001, kv_read_bytes=1024
        )
        refused = worker_pb2.StrategyPrediction(
            kernel=inference_pb2.KERNEL_MULTI_ITEM, refusal="the fake worker has no mask"
        )
        return worker_pb2.PredictResponse(
            groups=[
                worker_pb2.GroupPrediction(
                    phase="prefill",
                    chosen=inference_pb2.KERNEL_CASCADE,
                    reason="cost_model",
                    rows=count(request.plan.token_ids),
                    segments=count(request.plan.segment_kind),
                    kv_avoided_bytes=4096,
                    strategies=[prediction, refused],
                )
            ]
        )

    def _log(self, line: str) -> None:
        if self._options.step_log is not None:
            with self._options.step_log.open("a") as log:
                log.write(line + "\n")


def end_with_parent(fd: int) -> None:
    """The parent keeps the other end of the pipe open as long as it lives."""
    while os.read(fd, 1):
        pass
    os._exit(0)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True, help="unix:PATH or HOST:PORT")
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--row-seconds", type=float, default=0.0, help="a step's, each row")
    parser.add_argument("--describe-seconds", type=float, default=0.0, help="time to load")
    parser.add_argument("--die-at-step", type=int, default=0, help="SIGKILL itself in this step")
    parser.add_argument("--exit-code", type=int, default=0, help="end at once with this code")
    parser.add_argument("--token", type=int, default=5, help="every sampled token")
    parser.add_argument("--step-log", type=Path, help="a line a step: start, end, rows")
    parser.add_argument("--steps-in-flight", type=int, default=2)
    parser.add_argument("--max-burst-steps", type=int, default=1)
    parser.add_argument("--classes", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--context-tokens", type=int, default=8192)
    parser.add_argument("--kv-pages", type=int, default=4096)
    parser.add_argument("--parent-fd", type=int)
    options = parser.parse_args()
    is_unix = options.listen.startswith("unix:")
    options.unix_path = options.listen.removeprefix("unix:") if is_unix else None
    return options


def main() -> None:
    options = parse_options()
    if options.exit_code:
        raise SystemExit(options.exit_code)
    if options.parent_fd is not None:
        threading.Thread(target=end_with_parent, args=(options.parent_fd,), daemon=True).start()
    server = grpc.server(
        ThreadPoolExecutor(max_workers=8),
        options=[
            ("grpc.max_send_message_length", UNLIMITED),
            ("grpc.max_receive_message_length", UNLIMITED),
        ],
    )
    worker = FakeWorker(options)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    server.add_insecure_port(options.listen)
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    with ExitStack() as stack:
        if options.unix_path is not None:
            path = Path(step_socket(options.unix_path))
            stack.enter_context(StepSocket(path, worker.results, ()))
        server.start()
        server.wait_for_termination()


if __name__ == "__main__":
    main()
