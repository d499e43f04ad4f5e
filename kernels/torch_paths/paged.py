"""Paged decode: every request reads the pages of its own block table, shared or not."""

import numpy as np

from stemserve.kernels.eligibility import decode_refusal
from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.kernels.torch_paths.schedule import Schedule, ScheduledAttention
from stemserve.kernels.torch_paths.segment_calls import chain_stages


class PagedAttention(ScheduledAttention):
    """Split-KV: a block table in several stretches of pages is read in parts, merged by LSE.

    Block tables are those of PagedAttention (arXiv 2309.06180), the parts those of FlashDecoding.
    """

    kernel = Kernel.PAGED
    phase = Phase.DECODE

    def refusal(self, layout: AttentionLayout) -> str | None:
        return decode_refusal(layout)

    def schedule(self, layout: AttentionLayout) -> Schedule:
        segments = np.arange(layout.num_segments, dtype=np.int32)
        return Schedule(num_rows=layout.num_rows, stages=chain_stages(layout, segments))
