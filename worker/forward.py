"""From a step's rows to the final hidden states that it reads."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from stemserve.kernels.host_array import device_tensor
from stemserve.kernels.layout import Int32
from stemserve.worker.attention import StepAttention
from stemserve.worker.graphs.capture import Capture
from stemserve.worker.graphs.gather_ending import ENDINGS, GatherEnding, head_entries
from stemserve.worker.graphs.piecewise import PiecewiseModel
from stemserve.worker.memory.kv_pool import KvPool
from stemserve.worker.models.layer_ops import PageWrites
from stemserve.worker.models.layers import Attend
from stemserve.worker.models.transformer import Transformer
from stemserve.worker.sampling.sampler import Sampler
from stemserve.worker.scorer import Readout, Scores
from stemserve.worker.steps.inputs import RowInputs, StepInputs
from stemserve.worker.steps.kv_writes import KvWrites
from stemserve.worker.steps.step import Step


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
        self._inputs = StepInputs(max_rows, head_entries(ENDINGS), pool.device)
        self._pieces: PiecewiseModel | None = None
        self._ending: GatherEnding | None = None
        self._is_dropped = False
        self.fallbacks: Counter[str] = Counter()  # steps that no pieces took, by reason

    def capture(
        self, model: Transformer, buckets: Sequence[int], capture: Capture
    ) -> Iterator[int]:
        """Run steps that fit a bucket by captured pieces of the model from now on.

        Yields the rows of each graph or set of them that is done.
        """
        pieces = PiecewiseModel(model, self._pool, self._inputs)
        yield from pieces.capture(buckets, capture)
        self._pieces = pieces
        head = model.device_gather
        sizes = [] if head is None else [size for size in ENDINGS if size.rows <= head.most_rows]
        if head is None or not buckets or not sizes:
            return
        static = pieces.static
        ending = GatherEnding(model, head, static.mixed, static.residual, self._inputs.head)
        yield from (size.rows for size in ending.capture(sizes, capture))
        self._ending = ending

    def drop_pieces(self) -> None:
        """Run every step launch by launch."""
        self._pieces = self._ending = None
        self._is_dropped = True

    def gather(self, step: Step, attend: StepAttention, readout: Readout) -> Scores | None:
        """What the step reads, on the host as of `Scores.on_host`; None: no graph holds that."""
        pieces, ending = self._pieces, self._ending
        if pieces is None or ending is None:
            return None
        bucket, size = pieces.bucket(step.num_rows), ending.size(step, readout)
        if bucket is None or size is None:
            return None
        fill = partial(ending.fill, size, step, readout)
        pieces.run(self._put(step, bucket, fill)[0], step.num_rows, attend)
        return ending.run(size, step, readout)

    def __call__(
        self, step: Step, attend: StepAttention, readout: Readout
    ) -> Tensor:  # [kept, hidden]
        rows = step.num_rows
        bucket = None if self._pieces is None else self._pieces.bucket(rows)
        token_ids, inputs = self._put(step, bucket or rows)
        keep_rows = None
        if len(readout.rows) < rows:
            keep_rows = device_tensor(readout.rows, self._pool.device)
        if self._pieces is not None and bucket is not None:
            self._pieces.run(token_ids, rows, attend)
            return self._pieces.end(keep_rows, rows)
        if self._pieces is not None:
            self.fallbacks["rows"] += 1
        elif self._is_dropped:
            self.fallbacks["dropped"] += 1
        pages = KvWrites(self._pool, inputs.slots)
        return self._model.hidden(token_ids, inputs.positions, attend, keep_rows, pages)

    def _put(
        self, step: Step, padded_rows: int, fill_head: Callable[[Int32], None] | None = None
    ) -> tuple[Tensor, RowInputs]:  # token ids of all padded rows; what is uploaded
        inputs = self._inputs.put(
            step.token_ids, step.positions, step.kv_slots, padded_rows, fill_head
        )
        token_ids = inputs.token_ids
        if step.reads_slots:
            token_ids = self._sampler.tables.token_ids(token_ids)
        return token_ids, inputs
