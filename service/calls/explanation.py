"""Make an Explain answer of the steps that a job would take and their predicted costs."""

import numpy as np

from stemserve.proto.v1 import info_pb2, worker_pb2
from stemserve.service.request import Int32

WIRE = np.dtype("<i4")


def explained_step(
    plan: worker_pb2.StepPlan, prediction: worker_pb2.PredictResponse, cached: Int32
) -> info_pb2.ExplainedStep:
    """`cached` counts the tokens of each node that are in the cache."""
    return info_pb2.ExplainedStep(
        nodes=_nodes(plan, cached),
        groups=[_group(group) for group in prediction.groups],
        rows=len(plan.token_ids) // WIRE.itemsize,
    )


def _nodes(plan: worker_pb2.StepPlan, cached: Int32) -> list[info_pb2.ForestNode]:
    parents = np.frombuffer(plan.node_parent, dtype=WIRE).tolist()
    tokens = np.frombuffer(plan.node_tokens, dtype=WIRE).tolist()
    rows = [0] * len(parents)
    segment_rows = np.diff(np.frombuffer(plan.segment_indptr, dtype=WIRE)).tolist()
    segment_nodes = np.frombuffer(plan.segment_node, dtype=WIRE).tolist()
    for node, count in zip(segment_nodes, segment_rows, strict=True):
        if node >= 0:
            rows[node] += count
    # Parents come before their children.
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            rows[parents[node]] += rows[node]
    columns = zip(parents, tokens, cached.tolist(), rows, strict=True)
    return [
        info_pb2.ForestNode(parent=parent, kv_tokens=kv, cached_tokens=hits, rows=count)
        for parent, kv, hits, count in columns
    ]


def _group(group: worker_pb2.GroupPrediction) -> info_pb2.AttentionGroup:
    return info_pb2.AttentionGroup(
        phase=group.phase,
        chosen=group.chosen,
        reason=group.reason,
        rows=group.rows,
        segments=group.segments,
        kv_avoided_bytes=group.kv_avoided_bytes,
        strategies=[
            info_pb2.StrategyCost(
                kernel=strategy.kernel,
                predicted_seconds=strategy.predicted_seconds,
                host_seconds=strategy.host_seconds,
                device_seconds=strategy.device_seconds,
                kv_read_bytes=strategy.kv_read_bytes,
                refusal=strategy.refusal,
            )
            for strategy in group.strategies
        ],
    )
