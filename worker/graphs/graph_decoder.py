"""Decode steps by captured graphs: one upload, two replays a sub-step, one download."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stemserve.kernels.codec.decode import CodecDecode
from stemserve.kernels.codec.growth import NO_GROWTH, Growth, leaf_growth
from stemserve.kernels.codec.host_tables import HostTables
from stemserve.kernels.layout import Int32
from stemserve.kernels.strategy import Kernel
from stemserve.proto.v1 import inference_pb2
from stemserve.worker.graphs.buckets import bucket_of
from stemserve.worker.graphs.decode_graph import DecodeGraph, Ending
from stemserve.worker.graphs.decode_memory import DecodeMemory
from stemserve.worker.graphs.decode_report import group_costs
from stemserve.worker.graphs.padded_burst import PaddedBurst, padded_burst
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.result import GroupCost, RanStep
from stemserve.worker.sampling.sampler import Drawn, Sampler
from stemserve.worker.scorer import Readout, Scorer, Scores, plan_readout
from stemserve.worker.steps.step import DECODE, Step
from stemserve.worker.transfer import to_host

log = logging.getLogger(__name__)

OWN_KERNELS = (0, inference_pb2.KERNEL_CODEC)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    step: Step
    graph: DecodeGraph
    burst: PaddedBurst
    host: HostTables
    growth: Growth


class GraphDecoder:
    """A `Decoder` of the runner. What it does not take, the runner launches kernel by kernel."""

    def __init__(
        self,
        memory: DecodeMemory,
        pool: KvPool,
        codec: CodecDecode,
        sampler: Sampler,
        scorer: Scorer,
        *,
        forced: Kernel | None,
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._codec = codec
        self._sampler = sampler
        self._scorer = scorer
        self._kernels = OWN_KERNELS if forced in (None, Kernel.CODEC) else ()
        self._planned: _Planned | None = None
        self.fallbacks: Counter[str] = Counter()  # decode steps that no graph took, by reason

    @property
    def buckets(self) -> list[int]:
        """Numbers of rows that have a graph, ascending."""
        return sorted(self._memory.graphs)

    def drop(self, rows: int) -> None:
        """Steps of so many rows take a larger graph from now on."""
        del self._memory.graphs[rows]

    def takes(self, step: Step) -> bool:
        """Plans the step, too."""
        self._planned = None
        if not self._is_decode(step):
            return False
        bucket = bucket_of(step.num_rows, self.buckets)
        if bucket is None:
            most = max(self.buckets, default=0)
            return self._refuse("rows", f"{step.num_rows} rows; the most are {most}")
        graph = self._memory.graphs[bucket]
        burst = padded_burst(
            step, bucket, spare_page=self._pool.spare_page, spare_slot=self._sampler.tables.spare
        )
        host = self._codec.planner.take(burst.layout)
        growth = NO_GROWTH
        if burst.steps > 1:
            growth = leaf_growth(host, graph.shape.tables, burst.leaf_tokens)
        misfit = graph.misfit(host, growth)
        if misfit is not None:
            return self._refuse("plan", misfit)
        self._planned = _Planned(step=step, graph=graph, burst=burst, host=host, growth=growth)
        return True

    def run(self, step: Step) -> Sequence[RanStep]:
        planned = self._planned
        if planned is None or planned.step is not step:
            raise RuntimeError("a step is run by graphs that did not take it")
        self._planned = None
        shape, memory = planned.graph.shape, self._memory
        parts = shape.pack(planned.burst, planned.host, planned.growth, memory.staging.take())
        memory.staging.send(memory.inputs, parts)
        # The device begins: what else there is to do here is done meanwhile.
        planned.graph.advance(paired=planned.host.paired)
        ending = self._ending(step, planned.graph)
        readout = plan_readout(step)
        if ending is None:
            scores = self._read_eagerly(planned, readout)
        else:
            scores = self._replay(planned, ending)
        return [
            RanStep(step=step, readout=readout, scores=of_sub_step, groups=[cost])
            for of_sub_step, cost in zip(scores, self._costs(planned), strict=True)
        ]

    def _is_decode(self, step: Step) -> bool:
        """Nothing but rows that are sampled once, with attention by the kernel of the graphs."""
        samples = step.samples.rows
        return (
            len(samples) == step.num_rows == len(step.segment_kind)
            and not len(step.gathers.rows)
            and not len(step.classify_rows)
            and bool((step.segment_kind == DECODE).all())
            and self._has_kernels(step.segment_kernel)
            and _is_each_once(samples)
        )

    def _has_kernels(self, forced: Int32) -> bool:
        """Those of the graphs serve all segments."""
        if not forced.any():
            return len(self._kernels) > 0
        return bool(np.isin(forced, self._kernels).all())

    def _refuse(self, reason: str, message: str) -> bool:
        level = logging.DEBUG if self.fallbacks[reason] else logging.WARNING
        log.log(level, "a decode step runs without its graph: %s", message)
        self.fallbacks[reason] += 1
        return False

    def _ending(self, step: Step, graph: DecodeGraph) -> Ending | None:
        """None: some logits are edited, or read, beside the draws."""
        if self._sampler.takes_likeliest(step.samples).all():
            return Ending.LIKELIEST
        drawn = Ending.DRAWN in graph.end and self._sampler.is_plain(step.samples).all()
        return Ending.DRAWN if drawn else None

    def _replay(self, planned: _Planned, ending: Ending) -> list[Scores]:
        """The first sub-step is at its final norm."""
        graph, step = planned.graph, planned.step
        end = graph.end[ending]
        for number in range(step.repeat):
            if number:
                graph.advance(paired=planned.host.paired)
            end()
        self._sampler.drew(step.samples.slots)
        order = np.argsort(step.samples.rows, kind="stable")
        results = to_host(graph.results[: step.repeat])
        return [_scores(of_step[:, : step.num_rows], order) for of_step in results]

    def _read_eagerly(self, planned: _Planned, readout: Readout) -> list[Scores]:
        """The first sub-step is at its final norm."""
        graph, step = planned.graph, planned.step
        scores: list[Scores] = []
        for number in range(step.repeat):
            if number:
                graph.advance(paired=planned.host.paired)
            hidden = graph.hidden[: step.num_rows]
            scores.append(self._scorer.read(step.at(number), readout, hidden).on_host())
        return scores

    def _costs(self, planned: _Planned) -> Iterator[GroupCost]:
        return group_costs(
            planned.burst,
            planned.host,
            self._codec,
            self._pool.shape.bytes_per_token,
        )


def _is_each_once(rows: Int32) -> bool:
    """They are 0, 1, ... in some order."""
    every = np.arange(len(rows))
    return bool((rows == every).all()) or bool((np.sort(rows) == every).all())


def _scores(
    results: Tensor,  # [3, rows] int32 on the host: tokens, bits of log-probabilities, failed
    order: np.ndarray[tuple[int], np.dtype[np.intp]],  # [rows] the sample of each row
) -> Scores:
    """Views: the numbers are there once the device has passed the launch."""
    rows = len(order)
    nothing = torch.empty(0)
    nobody = torch.empty(0, dtype=torch.bool)
    logprobs = results[1].view(torch.float32)
    drawn = Drawn(
        tokens=results[0],
        logprobs=logprobs,
        failed=results[2].view(torch.bool)[::4],  # the lowest byte of each
        top_counts=np.zeros(rows, np.int32),
        top_ids=torch.empty((rows, 0), dtype=torch.int64),
        top_logprobs=torch.empty((rows, 0)),
    )
    return Scores(
        gather_logprobs=nothing,
        gather_argmax=torch.empty(0, dtype=torch.int64),
        class_scores=nothing.view(0, 0),
        failed_gathered=nobody,
        failed_classified=nobody,
        draws=[(order, drawn)],
    )
