"""The forward pass of items over a resident prefix, without a server: the worker's runner alone."""

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from workloads import Int32, ScoreWorkload

from stemserve.proto.v1 import worker_pb2
from stemserve.worker.blobs import decode_float32, encode_int32
from stemserve.worker.config import parse_config
from stemserve.worker.start import make_parts

KV_PAGES = 256


class InProcessRunner:
    def __init__(self, model: Path, *, threads: int, max_step_tokens: int) -> None:
        options = {
            "--listen": "unix:/unused",
            "--model": model,
            "--threads": threads,
            "--kv-pages": KV_PAGES,
            "--max-step-tokens": max_step_tokens,
        }
        words = [str(word) for pair in options.items() for word in pair]
        parts = make_parts(parse_config(words), lambda *progress: None, lambda: None)
        self._runner = parts.runner
        self._page_size = parts.facts.page_size
        self._step_id = 0

    def make_resident(self, prefix: Int32) -> None:
        """Compute the prefix into the first pages."""
        rows = np.arange(len(prefix), dtype=np.int32)
        plan = self._plan(prefix, rows, len(prefix))
        plan.kv_slots = encode_int32(rows)
        plan.segment_indptr = encode_int32(np.array([0, len(prefix)]))
        plan.segment_kind = encode_int32(np.array([worker_pb2.SEGMENT_KIND_PREFILL]))
        plan.segment_node = plan.segment_kernel = encode_int32(np.zeros(1, np.int32))
        self._run(plan)

    def label_probabilities(
        self, workload: ScoreWorkload
    ) -> tuple[NDArray[np.float32], float]:  # [items, labels], seconds
        """Seconds of the step alone: its plan is made before the clock starts."""
        count, length = workload.items.shape
        prefix_tokens, labels = len(workload.prefix), len(workload.label_ids)
        positions = np.tile(np.arange(length, dtype=np.int32) + prefix_tokens, count)
        plan = self._plan(workload.items.ravel(), positions, prefix_tokens)
        plan.kv_slots = encode_int32(np.full(count * length, -1))
        plan.segment_indptr = encode_int32(np.arange(count + 1) * length)
        plan.segment_kind = encode_int32(np.full(count, worker_pb2.SEGMENT_KIND_ITEM))
        plan.segment_node = plan.segment_kernel = encode_int32(np.zeros(count, np.int32))
        plan.gather_rows = encode_int32(np.arange(1, count + 1) * length - 1)
        plan.gather_indptr = encode_int32(np.arange(count + 1) * labels)
        plan.gather_ids = encode_int32(np.tile(workload.label_ids, count))
        started = time.perf_counter()
        result = self._run(plan)
        seconds = time.perf_counter() - started
        logprobs = decode_float32("gather_logprobs", result.gather_logprobs)
        return np.exp(logprobs).reshape(count, labels), seconds

    def _plan(self, tokens: Int32, positions: Int32, node_tokens: int) -> worker_pb2.StepPlan:
        """Rows over one node that fills the first pages; the segments are the caller's."""
        self._step_id += 1
        pages = -(-node_tokens // self._page_size)
        return worker_pb2.StepPlan(
            step_id=self._step_id,
            token_ids=encode_int32(tokens),
            positions=encode_int32(positions),
            node_parent=encode_int32(np.array([-1])),
            node_page_indptr=encode_int32(np.array([0, pages])),
            node_pages=encode_int32(np.arange(pages)),
            node_tokens=encode_int32(np.array([node_tokens])),
        )

    def _run(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        result = self._runner.step(plan)
        if result.error:
            raise RuntimeError(result.error)
        return result
