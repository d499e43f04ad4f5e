"""What calls cost on one GPU: alone, several at once, and when there are always more."""

from dataclasses import dataclass
from functools import cached_property

from stemserve.worker.capacity.forward_seconds import ForwardSeconds, Seconds
from stemserve.worker.capacity.planned_steps import (
    Step,
    decode_layout,
    planned_steps,
    prefill_layout,
)
from stemserve.worker.capacity.workload import Workload

FULL_STEPS = 8  # over which calls that wait are averaged
MOST_CALLS = 256  # of these


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of alike calls on one GPU and the hosts before it."""

    forward: ForwardSeconds
    workload: Workload
    step_rows: int  # of the largest step
    decode_rows: int  # samples that are generated together

    def prefill(self, calls: int) -> Seconds:
        """On the GPU, of calls at once."""
        total = Seconds()
        for step in self._steps(calls):
            total += self.forward.prefill(prefill_layout(step), self._read_rows(step))
        return total

    @cached_property
    def token(self) -> Seconds:
        """A step of `decode_rows` samples: one token of each."""
        return self.forward.decode(decode_layout(self.workload, self.decode_rows))

    @property
    def front_end_s(self) -> float:
        """Outside the worker, of a call alone."""
        return self.forward.rates.call_s + self._items_s

    @property
    def busy_front_end_s(self) -> float:
        """Of the front end's process, of each of many calls."""
        return self.forward.rates.busy_call_s + self._items_s

    @property
    def _items_s(self) -> float:
        return self.forward.rates.item_s * max(self.workload.items, self.workload.samples)

    def host_s(self, calls: int = 1) -> float:
        """Of the worker's host, before the GPU starts the first step of so many calls."""
        rates = self.forward.rates
        stored = sum(tree.stored for tree in self._steps(calls)[0])
        return rates.step_host_s + rates.stored_token_s * stored

    def at_once(self, calls: int) -> float:
        """Until the last of calls that come at the same moment is answered; of Score."""
        waiting = max(self.prefill(calls).total, (calls - 1) * self.busy_front_end_s)
        return self.front_end_s + self.host_s(calls) + waiting

    @cached_property
    def alone_s(self) -> float:
        """A call that nothing else delays."""
        generating = self.token.total * self.workload.new_tokens if self.workload.generates else 0.0
        return self.at_once(1) + generating

    @cached_property
    def busy_s(self) -> dict[str, float]:
        """Of a call where there are always more: by what can be the limit."""
        calls = self._many
        steps = len(self._steps(calls))
        device = self.prefill(calls).total / calls
        if self.workload.generates:
            device += self.token.total * self.workload.own_tokens / self.decode_rows
        return {
            "GPU": device,
            "worker's host": self.host_s(calls) * steps / calls,
            "front end": self.busy_front_end_s,
        }

    @property
    def limit(self) -> str:
        return max(self.busy_s, key=lambda name: self.busy_s[name])

    @property
    def calls_per_second(self) -> float:
        """The most that one GPU can answer."""
        return 1 / self.busy_s[self.limit]

    def _steps(self, calls: int) -> list[Step]:
        return planned_steps(self.workload, calls, self.step_rows)

    @cached_property
    def _many(self) -> int:
        """Calls that fill several steps."""
        few = 16  # so many that the hit rate is met
        rows = sum(tree.rows for step in self._steps(few) for tree in step) / few
        return min(MOST_CALLS, max(few, round(FULL_STEPS * self.step_rows / max(rows, 1))))

    def _read_rows(self, step: Step) -> int:
        """That go through the head."""
        work = self.workload
        if work.generates:
            return sum(tree.stored == work.prefix_tokens for tree in step)
        each = work.item_tokens if work.token_logprobs else 1
        return sum(tree.items for tree in step) * each
