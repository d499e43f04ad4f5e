"""When each alert fires: a story of its series, and the labels that it then has."""

from typing import NamedTuple

TARGET = 'namespace="n",job="stemserve",instance="i"'
OF_REPLICA = {"namespace": "n", "job": "stemserve", "instance": "i"}
OF_JOB = {"namespace": "n", "job": "stemserve"}


class Case(NamedTuple):
    """After `quiet` minutes nothing fires, after `loud` the alert does. One sample a minute."""

    alert: str
    series: dict[str, str]  # name and own labels: values, in promtool's notation
    loud: str
    labels: dict[str, str]  # of the alert, but for its severity
    quiet: str = "0m"


def requests(code: str, values: str, method: str = "score") -> dict[str, str]:
    return {f'requests_total{{method="{method}",code="{code}",tenant="other"}}': values}


def latency(name: str, slow_from: str, values: str, labels: str = "") -> dict[str, str]:
    """All calls are slower than the bound `slow_from`."""
    sep = "," if labels else ""
    return {
        f'{name}_bucket{{le="{slow_from}"{sep}{labels}}}': "0x600",
        f'{name}_bucket{{le="1000"{sep}{labels}}}': values,
        f'{name}_bucket{{le="+Inf"{sep}{labels}}}': values,
        f"{name}_count{{{labels}}}": values,
    }


OK = requests("OK", "0+600x600")
CASES = [
    Case(
        "ErrorBudgetFastBurn",
        OK | requests("INTERNAL", "0x60 0+30x100"),
        "130m",
        OF_JOB,
        quiet="60m",
    ),
    Case("ErrorBudgetSlowBurn", OK | requests("UNAVAILABLE", "0x60 0+6x500"), "420m", OF_JOB),
    Case(
        "ScoreLatencyFastBurn",
        latency("request_duration_seconds", "0.25", "0+60x200", 'method="score"'),
        "100m",
        OF_JOB,
    ),
    Case(
        "ScoreLatencySlowBurn",
        latency("request_duration_seconds", "0.25", "0+60x600", 'method="score"'),
        "420m",
        OF_JOB,
    ),
    Case(
        "TtftHigh",
        latency("time_to_first_token_seconds", "2.5", "0+60x60", 'prefix="miss"'),
        "40m",
        OF_JOB,
    ),
    Case("InterTokenSlow", latency("inter_token_seconds", "0.25", "0+600x60"), "40m", OF_JOB),
    Case("NoReadyReplica", {"ready": "1x30 0x30"}, "40m", OF_JOB, quiet="25m"),
    Case("ReplicaNotReady", {"ready": "1x10 0x60"}, "40m", OF_REPLICA, quiet="20m"),
    Case("EngineStalled", {"engine_stall_seconds": "0x10 0+60x20"}, "20m", OF_REPLICA, "9m"),
    Case(
        "WorkerDown",
        {'worker_up{rank="0"}': "1x10 0x60", "model_load_seconds": "20x80"},
        "30m",
        OF_REPLICA,
        quiet="12m",
    ),
    Case(
        "WorkerRestarting",
        {'worker_restarts_total{reason="exit"}': "0x10 0+1x50"},
        "30m",
        OF_REPLICA,
    ),
    Case("QueueBacklog", {"queue_oldest_seconds": "0x10 7x60"}, "30m", OF_JOB, quiet="12m"),
    Case(
        "Rejecting",
        OK | {'admission_rejected_total{reason="queue_full",tenant="other"}': "0x10 0+60x60"},
        "40m",
        OF_JOB,
        quiet="10m",
    ),
    Case("DeadlinesMissed", OK | requests("DEADLINE_EXCEEDED", "0+12x100"), "60m", OF_JOB),
    Case(
        "CallersGiveUp",
        OK | {'requests_cancelled_total{phase="queued",cause="client"}': "0+90x100"},
        "60m",
        OF_JOB,
    ),
    Case(
        "TenantThrottled",
        {'admission_rejected_total{reason="tenant_quota",tenant="t"}': "0+90x100"},
        "60m",
        OF_JOB | {"tenant": "t"},
    ),
    Case(
        "AuthFailures",
        {'auth_failures_total{reason="expired"}': "0+600x100"},
        "60m",
        OF_JOB | {"reason": "expired"},
    ),
    Case("KvNearlyFull", {"kv_utilization_ratio": "0.5x10 0.97x60"}, "40m", OF_REPLICA, "10m"),
    Case("Preempting", {"kv_preemptions_total": "0+60x60"}, "40m", OF_REPLICA),
    Case(
        "CacheThrashing",
        {
            'prefix_evictions_total{tier="hbm",reason="capacity"}': "0+2000x60",
            'kv_blocks{state="cached"}': "1000x60",
        },
        "40m",
        OF_REPLICA,
    ),
    Case(
        "PrefixHitRateDrop",
        {
            "prefix_lookup_tokens_total": "0+1000x1700",
            'prefix_hit_tokens_total{tier="hbm"}': "0+900x1400 1260000+100x300",
        },
        "1560m",
        OF_JOB,
        quiet="1400m",
    ),
    Case(
        "SharingLost",
        {
            'attention_kv_read_bytes_total{op="prefill",path="codec"}': "0+1000x1700",
            'attention_kv_avoided_bytes_total{op="prefill",path="codec"}': (
                "0+9000x1400 12600000+100x300"
            ),
        },
        "1600m",
        OF_JOB,
    ),
    Case(
        "AffinityLost",
        {
            'prefix_affinity_total{outcome="home"}': "0+90x60 5400+10x200",
            'prefix_affinity_total{outcome="moved"}': "0+10x60 600+90x200",
            'prefix_affinity_total{outcome="nokey"}': "0+900x260",
            "ready": "1x260",
            'ready{pod="another"}': "1x260",
        },
        "120m",
        OF_JOB,
        quiet="60m",
    ),
    Case(
        "SpansDropped",
        {
            'trace_spans_total{outcome="exported"}': "0+100x60",
            'trace_spans_total{outcome="queue_full"}': "0x20 0+1x40",
        },
        "50m",
        OF_REPLICA | {"outcome": "queue_full"},
        quiet="20m",
    ),
    Case(
        "KernelFallback",
        {'kernel_fallbacks_total{op="decode",path="paged",reason="lacking"}': "0+1x60"},
        "40m",
        OF_JOB | {"op": "decode", "path": "paged", "reason": "lacking"},
    ),
    Case(
        "GraphFallback",
        {'graph_fallbacks_total{path="pieces",reason="rows"}': "0+60x60"},
        "40m",
        OF_REPLICA | {"path": "pieces", "reason": "rows"},
    ),
    Case(
        "CostModelDrift",
        {
            'kernel_actual_seconds_total{op="decode",path="codec"}': "0+3x120",
            'kernel_predicted_seconds_total{op="decode",path="codec"}': "0+1x120",
        },
        "90m",
        OF_JOB | {"op": "decode", "path": "codec"},
    ),
    Case(
        "KernelRegretHigh",
        {
            'kernel_regret_seconds_total{op="prefill"}': "0x10 0+2x140",
            'kernel_probed_seconds_total{op="prefill"}': "0+10x150",
        },
        "120m",
        OF_JOB | {"op": "prefill"},
        quiet="12m",
    ),
    Case("MemoryShortage", {"step_memory_shortages_total": "0x10 0+1x60"}, "40m", OF_REPLICA),
    Case(
        "DeviceIdle",
        {
            'device_idle_seconds_total{phase="decode"}': "0+40x60",
            'device_busy_seconds_total{phase="decode"}': "0+20x60",
        },
        "40m",
        OF_REPLICA,
    ),
]
# Of other exporters, or of the process: with their full names.
OTHERS = [
    Case("TargetDown", {f"up{{{TARGET}}}": "1x10 0x60"}, "30m", OF_REPLICA, quiet="12m"),
    Case(
        "ModelLoadSlow",
        {
            f"stemserve_ready{{{TARGET}}}": "0x60",
            f"process_start_time_seconds{{{TARGET}}}": "0x60",
        },
        "15m",
        OF_REPLICA,
        quiet="8m",
    ),
    Case(
        "FilesNearlyUsedUp",
        {
            f"process_open_fds{{{TARGET}}}": "10x10 900x60",
            f"process_max_fds{{{TARGET}}}": "1000x80",
        },
        "30m",
        OF_REPLICA,
        quiet="10m",
    ),
    Case(
        "MemoryGrows",
        {f"process_resident_memory_bytes{{{TARGET}}}": "9e9+6e7x300"},
        "180m",
        OF_REPLICA,
    ),
    Case(
        "ReplicaSkew",
        {
            f'stemserve_{name}{{namespace="n",job="stemserve",instance="{instance}"{own}}}': values
            for instance in ("a", "b", "c", "d")
            for name, own, values in (
                ("ready", "", "1x60"),
                ("requests_total", ',method="score"', "0+900x60" if instance == "a" else "0+9x60"),
            )
        },
        "40m",
        OF_JOB,
    ),
    Case(
        "CertExpiring",
        {
            "certmanager_certificate_expiration_timestamp_seconds"
            '{namespace="n",name="stemserve"}': "86400x200"
        },
        "100m",
        {"namespace": "n", "name": "stemserve"},
    ),
    Case("GpuXid", {'DCGM_FI_DEV_XID_ERRORS{gpu="0"}': "0x10 79x50"}, "20m", {"gpu": "0"}, "5m"),
    Case(
        "GpuEccUncorrectable",
        {'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="0"}': "0x10 1x50"},
        "20m",
        {"gpu": "0"},
        quiet="5m",
    ),
    Case(
        "AutoscalerAtMax",
        {
            "kube_horizontalpodautoscaler_status_current_replicas"
            '{namespace="n",horizontalpodautoscaler="stemserve"}': "4x60",
            "kube_horizontalpodautoscaler_spec_max_replicas"
            '{namespace="n",horizontalpodautoscaler="stemserve"}': "4x60",
        },
        "30m",
        {"namespace": "n", "horizontalpodautoscaler": "stemserve"},
    ),
    Case(
        "Unschedulable",
        {'kube_pod_status_unschedulable{namespace="n",pod="stemserve-0"}': "1x60"},
        "30m",
        {"namespace": "n"},
    ),
]


def full(series: str) -> str:
    """With our prefix and the labels of a target."""
    name, brace, labels = series.partition("{")
    own = labels.removesuffix("}") if brace else ""
    return f"stemserve_{name}{{{TARGET}{',' if own else ''}{own}}}"


def every_case() -> list[Case]:
    ours = [case._replace(series={full(s): v for s, v in case.series.items()}) for case in CASES]
    return ours + OTHERS
