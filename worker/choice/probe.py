"""Run an attention group of the last step once more while nothing else is to be done, beside the
strategy that was predicted to be the next best: what the choice really cost.

Nothing of a request changes: a probe reads pages, and has random rows and results of its own.
"""

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from stemserve.kernels.attention_state import LayerKV
from stemserve.kernels.layout import AttentionLayout, HeadShape
from stemserve.kernels.strategy import Strategy
from stemserve.proto.v1 import worker_pb2
from stemserve.worker.attention import make_clock
from stemserve.worker.choice.dispatch import KERNEL_CODES, Choice, Dispatcher
from stemserve.worker.choice.reason import Reason
from stemserve.worker.memory.budget import give_back, is_shortage
from stemserve.worker.memory.kv_pool import KvPool

log = logging.getLogger(__name__)

MOST_S = 0.02  # that a probe may keep a plan waiting, by the predictions
LONGEST_S = 0.1  # then it is given up
PASSES = (0, 1, 1, 0)  # chosen, runner-up, ...: what changes slowly meets both alike


class Prober:
    """Used by the thread that launches steps. `rate`: probes a step, at most 1."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        pool: KvPool,
        heads: HeadShape,
        dtype: torch.dtype,  # of rows
        *,
        rate: float,
    ) -> None:
        self._dispatcher = dispatcher
        self._pool = pool
        self._heads = heads
        self._dtype = dtype
        self._rate = rate
        self._due = 0.0  # a probe at 1
        self._choices: Sequence[Choice] = ()  # of the last step
        self._steps = 0
        self._done: list[worker_pb2.Probe] = []
        self._numbers = torch.Generator(pool.device)

    @property
    def is_due(self) -> bool:
        return self._due >= 1 and bool(self._choices)

    def take(self) -> list[worker_pb2.Probe]:
        """What was probed since the last call."""
        done, self._done = self._done, []
        return done

    def note(self, choices: Sequence[Choice]) -> None:
        """Of a step that is launched. Where nobody chose there is nothing to probe."""
        self._steps += 1
        self._due = min(1.0, self._due + self._rate)
        self._choices = [c for c in choices if c.reason is Reason.COST_MODEL]

    @torch.inference_mode()
    def probe(self) -> None:
        """One group of the last step, in turn."""
        choice = self._choices[self._steps % len(self._choices)]
        self._choices = ()
        self._due = 0.0
        try:
            found = self._compare(choice)
        except Exception as error:
            if not is_shortage(error):
                raise
            found = None
            give_back(uses_gpu=self._uses_gpu)
        if found is not None:
            self._done.append(found)

    @property
    def _uses_gpu(self) -> bool:
        return self._pool.device.type == "cuda"

    def _compare(self, choice: Choice) -> worker_pb2.Probe | None:
        """None where no other strategy takes the group, or where it takes too long."""
        predictions = [p for p in self._dispatcher.predict(choice.group) if p.refusal is None]
        kernel = choice.strategy.kernel
        others = [p for p in predictions if p.kernel is not kernel]
        if not others:
            return None
        seconds = others[0].seconds + sum(p.seconds for p in predictions if p.kernel is kernel)
        layers = min(self._pool.shape.layers, int(MOST_S / (len(PASSES) / 2) / max(seconds, 1e-9)))
        if not layers:
            return None
        other = self._dispatcher.strategy(choice.group.phase, others[0].kernel)
        times = self._times(choice.group.layout, (choice.strategy, other), layers)
        if times is None:
            return None
        scale = self._pool.shape.layers / layers
        return worker_pb2.Probe(
            phase=choice.group.phase,
            chosen=KERNEL_CODES[kernel],
            runner_up=KERNEL_CODES[other.kernel],
            chosen_seconds=times[0] * scale,
            runner_up_seconds=times[1] * scale,
        )

    def _times(
        self, layout: AttentionLayout, pair: tuple[Strategy, Strategy], layers: int
    ) -> tuple[float, float] | None:
        """Seconds that each takes for so many layers: the faster of two passes."""
        until_s = time.perf_counter() + LONGEST_S
        q = self._rows(layout.num_rows, self._heads.query_heads)
        k, v = (self._rows(layout.num_rows, self._heads.kv_heads) for _ in range(2))
        plans = [strategy.plan(layout) for strategy in pair]
        clocks = [make_clock(self._pool.device, timed=True) for _ in PASSES]
        for which, clock in zip(PASSES, clocks, strict=True):
            for layer in range(layers):
                if time.perf_counter() > until_s:
                    return None
                kv = LayerKV(self._pool.k_pages(layer), self._pool.v_pages(layer), k, v)
                with clock:
                    pair[which].run(plans[which], q, kv)
        if self._uses_gpu:
            torch.cuda.synchronize()
        spent = [clock.seconds() for clock in clocks]
        return min(spent[0], spent[3]), min(spent[1], spent[2])

    def _rows(self, rows: int, heads: int) -> Tensor:
        size = (rows, heads, self._heads.head_dim)
        numbers = torch.randn(size, generator=self._numbers, device=self._pool.device)
        return numbers.to(self._dtype)


def make_prober(
    dispatcher: Dispatcher, pool: KvPool, heads: HeadShape, dtype: torch.dtype, *, rate: float
) -> Prober | None:
    """None: steps are not probed."""
    if not rate:
        return None
    if pool.device.type != "cpu":
        # There steps are launched by whoever brings them: no thread waits that could probe.
        log.warning("--kernel-probe-rate %g is ignored: only a worker on a CPU probes", rate)
        return None
    return Prober(dispatcher, pool, heads, dtype, rate=rate)
