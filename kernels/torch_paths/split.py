"""Split attention: the stored chunks in one batch, then the items, which find the cache filled."""

import numpy as np

from stemserve.kernels.layout import AttentionLayout
from stemserve.kernels.strategy import Kernel, Phase
from stemserve.kernels.torch_paths.schedule import Schedule, ScheduledAttention
from stemserve.kernels.torch_paths.segment_calls import chain_stages, own_stage, stepped_stage


class SplitAttention(ScheduledAttention):
    """Two rounds, as in engines that find a prefix in their cache (RadixAttention of SGLang)."""

    kernel = Kernel.SPLIT
    phase = Phase.PREFILL

    def refusal(self, layout: AttentionLayout) -> str | None:
        return None

    def schedule(self, layout: AttentionLayout) -> Schedule:
        stored = np.flatnonzero(~layout.segment_is_item).astype(np.int32)
        items = np.flatnonzero(layout.segment_is_item).astype(np.int32)
        first = [*chain_stages(layout, stored), stepped_stage(layout, stored)]
        second = [*chain_stages(layout, items), own_stage(layout, items)]
        return Schedule(num_rows=layout.num_rows, stages=[*first, *second])
