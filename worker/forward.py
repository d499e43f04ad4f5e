"""From a step's rows to the final hidden states that it reads."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from stemserve.kernels.host_array import device_tensor
from stemserve.worker.attention import StepAttention
from stemserve.worker.graphs.capture import Capture
from stemserve.worker.graphs.piecewise import PiecewiseModel
from stemserve.worker.kv_pool import KvPool
from stemserve.worker.kv_writes import KvWrites
from stemserve.worker.models.layer_ops import PageWrites
from stemserve.worker.models.layers import Attend
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.sampler import Sampler
from stemserve.worker.scorer import Readout
from stemserve.worker.step import Step
from stemserve.worker.step_inputs import StepInputs


class Model(Protocol):
    def hidden(
        self,
        token_ids: Tensor,  # [rows]
        positions: Tensor,  # [rows]
        attend: Attend,
        keep_rows: Tensor | None,  # [kept] rows that go on after the last attention; None: all
        pages: PageWrites,
    ) -> Tensor: ...  # [kept, hidden]


class Forward:
    """Small steps by captured pieces where there are any, the others launch by launch."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        sampler: Sampler,
        max_rows: int,
    ) -> None:
        self._model = model
        self._pool = pool
        self._sampler = sampler
        self._inputs = StepInputs(max_rows, pool.device)
        self._pieces: PiecewiseModel | None = None

    def capture(
        self, model: Transformer, buckets: Sequence[int], capture: Capture
    ) -> Iterator[int]:
        """Run steps that fit a bucket by captured pieces of the model from now on.

        Yields each bucket that is done.
        """
        pieces = PiecewiseModel(model, self._pool, self._inputs)
        yield from pieces.capture(buckets, capture)
        self._pieces = pieces

    def __call__(
        self, step: Step, attend: StepAttention, readout: Readout
    ) -> Tensor:  # [kept, hidden]
        rows = step.num_rows
        bucket = None if self._pieces is None else self._pieces.bucket(rows)
        inputs = self._inputs.put(step.token_ids, step.positions, step.kv_slots, bucket or rows)
        token_ids = inputs.token_ids[:rows]
        if int(step.token_ids.min()) < 0:
            token_ids = self._sampler.token_ids(step.token_ids)
        keep_rows = None
        if len(readout.rows) < rows:
            keep_rows = device_tensor(readout.rows, self._pool.device)
        if self._pieces is not None and bucket is not None:
            return self._pieces.hidden(token_ids, attend, keep_rows, bucket)
        pages = KvWrites(self._pool, inputs.slots)
        return self._model.hidden(token_ids, inputs.positions, attend, keep_rows, pages)
