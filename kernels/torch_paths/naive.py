"""Naive attention: every request by itself, over a contiguous copy of all that it sees."""

import numpy as np

from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.kernels.torch_paths.schedule import Schedule, ScheduledAttention, Stage
from stemserve.kernels.torch_paths.segment_calls import copied_chain_stage, own_stage, stepped_stage


class NaiveAttention(ScheduledAttention):
    """What a server does that neither batches nor pages: the baseline of the others."""

    kernel = Kernel.NAIVE
    phase = Phase.PREFILL

    def refusal(self, layout: AttentionLayout) -> str | None:
        return None

    def schedule(self, layout: AttentionLayout) -> Schedule:
        segments = np.arange(layout.num_segments, dtype=np.int32)
        own: Stage = []
        for segment in segments:  # no batch of items: each is a request of its own
            own += own_stage(layout, segments[segment : segment + 1])
        chains = copied_chain_stage(layout, segments)
        stepped = stepped_stage(layout, segments, copied=True)
        return Schedule(num_rows=layout.num_rows, stages=[chains, [*stepped, *own]])
