"""Ragged attention: one batch of segments of any length over block tables that share pages."""

import numpy as np

from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.kernels.torch_paths.schedule import Schedule, ScheduledAttention
from stemserve.kernels.torch_paths.segment_calls import chain_stages, own_stage, stepped_stage


class RaggedAttention(ScheduledAttention):
    """As FlashInfer's ragged and paged prefill of a batch (arXiv 2501.01005)."""

    kernel = Kernel.RAGGED
    phase = Phase.PREFILL

    def refusal(self, layout: AttentionLayout) -> str | None:
        return None

    def schedule(self, layout: AttentionLayout) -> Schedule:
        segments = np.arange(layout.num_segments, dtype=np.int32)
        own = [*stepped_stage(layout, segments), *own_stage(layout, segments)]
        return Schedule(num_rows=layout.num_rows, stages=[*chain_stages(layout, segments), own])
