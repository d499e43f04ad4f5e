"""A worker that executes plans literally and checks every promise of worker.proto."""

from collections.abc import Iterable

import numpy as np
from tests.service.burst_plans import joined, sub_steps
from tests.service.toy_model import CLASSES, SEED, draw, extend, logits_of, logprobs_of

from stemserve.proto.v1 import worker_pb2
from stemserve.service.batching.steps.plan_arrays import (
    pack_float32,
    pack_int32,
    unpack_float32,
    unpack_int32,
)
from stemserve.service.request import Int32, SamplerSpec

PAGE = 16
ITEM = worker_pb2.SEGMENT_KIND_ITEM
DECODE = worker_pb2.SEGMENT_KIND_DECODE


class StepArrays:
    """The rows of a plan and the slots of their chains, checked for their shape."""

    def __init__(self, plan: worker_pb2.StepPlan) -> None:
        self.token_ids: list[int] = unpack_int32(plan.token_ids).tolist()
        self.positions: list[int] = unpack_int32(plan.positions).tolist()
        self.slots: list[int] = unpack_int32(plan.kv_slots).tolist()
        self.kinds: list[int] = unpack_int32(plan.segment_kind).tolist()
        indptr: list[int] = unpack_int32(plan.segment_indptr).tolist()
        nodes: list[int] = unpack_int32(plan.segment_node).tolist()
        rows, segments = len(self.token_ids), len(self.kinds)
        assert rows == len(self.positions) == len(self.slots) == indptr[-1] > 0
        assert segments == len(nodes) == len(indptr) - 1
        assert segments == len(unpack_int32(plan.segment_kernel))
        written = [slot for slot in self.slots if slot >= 0]
        assert len(set(written)) == len(written), "two rows write one slot"
        self.segments = list(zip(indptr, indptr[1:], strict=False))
        chains = node_chains(plan)
        self.chains: list[list[int]] = [chains[node] if node >= 0 else [] for node in nodes]
        for segment, (first, end) in enumerate(self.segments):
            self._check_segment(self.kinds[segment], self.chains[segment], first, end)

    def _check_segment(self, kind: int, chain: list[int], first: int, end: int) -> None:
        length = end - first
        assert length > 0 and (kind != DECODE or length == 1)
        start = len(chain) if kind == ITEM else len(chain) - length
        assert self.positions[first:end] == list(range(start, start + length))
        for row in range(first, end):
            wanted = -1 if kind == ITEM else chain[self.positions[row]]
            assert self.slots[row] in (-1, wanted)


def node_chains(plan: worker_pb2.StepPlan) -> list[list[int]]:
    """KV slots of the chain that ends in each node."""
    parents: list[int] = unpack_int32(plan.node_parent).tolist()
    indptr: list[int] = unpack_int32(plan.node_page_indptr).tolist()
    pages: list[int] = unpack_int32(plan.node_pages).tolist()
    tokens: list[int] = unpack_int32(plan.node_tokens).tolist()
    assert len(indptr) == len(parents) + 1 and len(tokens) == len(parents)
    chains: list[list[int]] = []
    path: list[int] = []
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        assert parent == (path[-1] if path else -1), "not in depth-first order"
        path.append(node)
        own = pages[indptr[node] : indptr[node + 1]]
        assert tokens[node] > 0 and len(own) == -(-tokens[node] // PAGE)
        assert parent < 0 or tokens[parent] % PAGE == 0
        slots = [page * PAGE + i for page in own for i in range(PAGE)][: tokens[node]]
        chains.append((chains[parent] if parent >= 0 else []) + slots)
    return chains


class LiteralWorker:
    """Keeps in each KV slot the token, and the state of the sequence that it ended."""

    def __init__(self, kv_pages: int, max_rows: int) -> None:
        self.rows_run = 0
        self.step_seconds = 0.01
        self.bad_states: set[int] = set()  # of rows whose logits are not finite
        self.trusting_from = 1  # earlier steps build on a failed one: what they read is not checked
        self._max_rows = max_rows
        self._kv = [0] * (kv_pages * PAGE)
        self._tokens = [-1] * (kv_pages * PAGE)
        self._sampled: dict[int, int] = {}
        self._samplers: dict[int, SamplerSpec] = {}
        self._drafted: set[int] = set()  # slots that hold no token, though they were sampled
        self._checks = True

    def run(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        if plan.repeat > 1:
            return joined([self._run_step(step) for step in sub_steps(plan)], plan)
        return self._run_step(plan)

    def forget(self, plan: worker_pb2.StepPlan, rows: Iterable[int]) -> None:
        """What these rows have stored is something else."""
        slots = unpack_int32(plan.kv_slots)[list(rows)]
        for slot in slots[slots >= 0].tolist():
            self._kv[slot], self._tokens[slot] = 0, -1

    def _run_step(self, plan: worker_pb2.StepPlan) -> worker_pb2.StepResult:
        self._checks = plan.step_id >= self.trusting_from
        arrays = StepArrays(plan)
        assert len(arrays.token_ids) <= self._max_rows
        self._copy(unpack_int32(plan.copies).reshape(-1, 3))
        states = self._run_rows(arrays)
        self.rows_run += len(states)
        return self._read(plan, states)

    def _copy(self, copies: Int32) -> None:
        sources, targets, counts = copies.T.tolist()
        assert len(set(targets)) == len(targets) and not set(targets) & set(sources)
        for source, target, count in zip(sources, targets, counts, strict=True):
            assert 1 <= count < PAGE
            for offset in range(count):
                self._kv[target * PAGE + offset] = self._kv[source * PAGE + offset]
                self._tokens[target * PAGE + offset] = self._tokens[source * PAGE + offset]

    def _run_rows(self, arrays: StepArrays) -> list[int]:
        """The state of each row."""
        read_slots = {-1 - token for token in arrays.token_ids}
        assert not self._checks or self._drafted.isdisjoint(read_slots)
        inputs = [
            self._sampled.get(-1 - token, 0) if token < 0 else token for token in arrays.token_ids
        ]
        writes = sorted((arrays.positions[row], row) for row in range(len(inputs)))
        previous = self._previous_slots(arrays)
        for position, row in writes:  # a row sees what the step's rows before it store
            if arrays.slots[row] >= 0:
                before = self._kv[previous[row]] if position else SEED
                self._kv[arrays.slots[row]] = extend(before, inputs[row])
                self._tokens[arrays.slots[row]] = inputs[row]
        states = [0] * len(inputs)
        for kind, chain, (first, end) in zip(
            arrays.kinds, arrays.chains, arrays.segments, strict=True
        ):
            state = self._chain_state(chain)
            for row in range(first, end):
                if kind == ITEM:
                    state = extend(state, inputs[row])
                    states[row] = state
                else:
                    slot = chain[arrays.positions[row]]
                    assert not self._checks or self._tokens[slot] == inputs[row]
                    states[row] = self._kv[slot]
        return states

    def _previous_slots(self, arrays: StepArrays) -> dict[int, int]:
        """Where the token before each stored row is kept."""
        return {
            row: chain[arrays.positions[row] - 1]
            for kind, chain, (first, end) in zip(
                arrays.kinds, arrays.chains, arrays.segments, strict=True
            )
            for row in range(first, end)
            if kind != ITEM
        }

    def _chain_state(self, chain: list[int]) -> int:
        state = SEED
        for slot in chain:
            state = extend(state, self._tokens[slot])
            assert not self._checks or self._kv[slot] == state, "a slot lacks the sequence's KV"
        return state

    def _read(self, plan: worker_pb2.StepPlan, states: list[int]) -> worker_pb2.StepResult:
        rows: list[int] = unpack_int32(plan.gather_rows).tolist()
        indptr: list[int] = unpack_int32(plan.gather_indptr).tolist()
        ids = unpack_int32(plan.gather_ids)
        assert len(indptr) == len(rows) + 1 and indptr[-1] == len(ids)
        gathered = [np.zeros(0)]
        for at, row in enumerate(rows):
            gathered.append(logprobs_of(states[row])[ids[indptr[at] : indptr[at + 1]]])
        classified: list[int] = unpack_int32(plan.classify_rows).tolist()
        scores = [np.zeros(0), *(logits_of(states[row], CLASSES) for row in classified)]
        sample_rows: list[int] = unpack_int32(plan.sample_rows).tolist()
        drawn = self._draw(plan, [states[row] for row in sample_rows])
        logprobs = [logprobs_of(states[row])[t] for row, t in zip(sample_rows, drawn, strict=True)]
        read = {*rows, *classified, *sample_rows}
        return worker_pb2.StepResult(
            step_id=plan.step_id,
            gather_logprobs=pack_float32(np.concatenate(gathered).astype(np.float32)),
            gather_argmax=pack_int32([int(logits_of(states[row]).argmax()) for row in rows]),
            class_scores=pack_float32(np.concatenate(scores).astype(np.float32)),
            sampled_tokens=pack_int32(drawn),
            sampled_logprobs=pack_float32(np.array(logprobs, np.float32)),
            failed_rows=pack_int32([row for row in sorted(read) if states[row] in self.bad_states]),
            groups=[
                worker_pb2.GroupReport(phase=phase, kv_read_bytes=1000, kv_avoided_bytes=500)
                for phase in ("prefill", "decode")
            ],
            step_seconds=self.step_seconds,
        )

    def _draw(self, plan: worker_pb2.StepPlan, states: list[int]) -> list[int]:
        for sampler in plan.samplers:
            self._samplers[sampler.slot] = SamplerSpec(
                temperature=sampler.temperature,
                top_k=sampler.top_k,
                top_p=sampler.top_p,
                min_p=sampler.min_p,
                seed=sampler.seed,
                bias_ids=unpack_int32(sampler.bias_ids),
                bias_values=unpack_float32(sampler.bias_values),
                banned_ids=unpack_int32(sampler.banned_ids),
                min_new_tokens=sampler.min_new_tokens,
                top_logprobs=sampler.top_logprobs,
            )
        slots: list[int] = unpack_int32(plan.sample_slots).tolist()
        index: list[int] = unpack_int32(plan.sample_index).tolist()
        assert len(set(zip(slots, index, strict=True))) == len(slots) == len(states)
        assert plan.repeat <= 1 or len(set(slots)) == len(slots)
        masks = {mask.slot: mask.allowed for mask in plan.masks}
        drawn = [
            draw(state, self._samplers[slot], at, masks.get(slot))
            if self._checks or slot in self._samplers
            else 0
            for state, slot, at in zip(states, slots, index, strict=True)
        ]
        self._sampled.update(zip(slots, drawn, strict=True))
        for slot in slots:  # of a draft it is not known which of its tokens counts
            if slots.count(slot) > 1:
                self._sampled.pop(slot, None)
                self._drafted.add(slot)
            else:
                self._drafted.discard(slot)
        return drawn
