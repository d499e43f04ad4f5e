"""What the attention of replayed decode steps read: it is known from the plan, not timed."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stemserve.kernels.codec.decode import host_work
from stemserve.kernels.codec.host_tables import HostTables
from stemserve.kernels.strategy import Phase, Strategy, Work
from stemserve.worker.attention import Clock, PlannedGroup
from stemserve.worker.choice.dispatch import Choice
from stemserve.worker.choice.reason import Reason
from stemserve.worker.graphs.padded_burst import PaddedBurst
from stemserve.worker.result import GroupCost
from stemserve.worker.steps.layout import AttentionGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class _HostPlan:
    """As much of a plan as a report reads."""

    work: Work


def group_costs(
    burst: PaddedBurst,
    host: HostTables,  # the plan of the last sub-step
    strategy: Strategy,
    bytes_per_token: int,
) -> Iterator[GroupCost]:  # of each sub-step
    layout = burst.own_layout
    rows = slice(0, layout.num_rows)
    choice = Choice(
        group=AttentionGroup(phase=Phase.DECODE, layout=layout, rows=rows),
        strategy=strategy,
        reason=Reason.GRAPH,
    )
    planned = PlannedGroup(
        choice=choice,
        plan=_HostPlan(work=host_work(host)),
        rows=rows,
        clock=Clock(),
        is_timed=False,
    )
    read, alone = planned.work.kv_tokens_read, choice.group.kv_tokens_one_by_one
    shorter = (burst.leaf_tokens[-1] - burst.leaf_tokens).sum(1, dtype=np.int64)
    for missing in shorter.tolist():
        yield GroupCost(
            planned=planned,
            predicted_seconds=0.0,
            kv_read_bytes=(read - missing) * bytes_per_token,
            kv_avoided_bytes=max(0, alone - read) * bytes_per_token,
        )
