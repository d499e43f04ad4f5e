"""Render the Helm chart as `helm template` does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from helm_python.chart import Chart

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "stemserve"
HASH = "9e85e32b6be2fd6e8d25080ee2f3b68f48ab8809829d54d25b7997d419fe92a9"

Object = dict[str, Any]
Values = Mapping[str, Any]

MATRIX: Mapping[str, Values] = {
    "defaults": {},
    "cpu": {"gpu": {"count": 0}, "router": {"mode": "none"}, "workload": "Deployment"},
    "volume": {
        "model": {"source": "pvc", "existingClaim": "weights", "path": "Qwen3-0.6B"},
        "replicas": 3,
        "settings": {
            "log_level": "debug",
            "log_format": "json",
            "tracing": {"otlp_endpoint": "http://collector:4317", "sample_ratio": 0.05},
            "server": {"max_connection_age_s": 300.5},
            "worker": {"kv_memory": "20G", "gpu_memory_utilization": 0.85, "deterministic": True},
            "limits": {"max_items": 2000, "max_queued_tokens": 8_000_000},
        },
    },
    "node folder": {
        "model": {"source": "hostPath", "hostPath": "/srv/models", "path": "a/b.gguf"},
        "workload": "Deployment",
        "replicas": 2,
    },
    "download": {
        "model": {
            "source": "download",
            "download": {
                "files": [{"name": "m.gguf", "url": "https://example/m.gguf", "sha256": HASH}],
                "tokenSecret": {"name": "hub", "key": "token"},
            },
        }
    },
    "keys over TLS": {
        "tls": {"secretName": "cert", "demandClientCertificate": True},
        "certificates": {"issuer": {"name": "authority", "kind": "ClusterIssuer"}},
        "auth": {"mode": "keys", "allowInsecure": False},
        "tenants": {
            "search": {"key_sha256": [HASH], "weight": 2, "group": "web"},
            "ads": {"key_sha256": ["0" * 64], "tokens_per_second": 0.5},
        },
        "test": {"apiKeySecret": {"name": "caller", "key": "key"}},
    },
    "client certificates": {
        "router": {"mode": "none"},
        "tls": {"secretName": "cert", "demandClientCertificate": True},
        "auth": {"mode": "mtls", "allowInsecure": False},
        "tenants": {"search": {"subjects": ["spiffe://example/search"]}},
    },
    "tokens": {
        "tls": {"secretName": "cert"},
        "auth": {
            "mode": "jwt",
            "allowInsecure": False,
            "jwt": {
                "jwksSecret": {"name": "jwks", "key": "keys.json"},
                "issuer": 'https://issuer/"quoted"',
                "audience": "stemserve",
            },
        },
        "tenants": {"search": {}},
    },
    "gateway": {"router": {"mode": "gateway"}, "gateway": {"name": "gate"}, "replicas": 2},
    "inference pool": {
        "router": {"mode": "inferencePool"},
        "replicas": 3,
        "inferencePool": {
            "endpointPicker": {"service": "picker"},
        },
        "gateway": {
            "name": "gate",
            "namespace": "gates",
            "sectionName": "grpc",
            "hostnames": ["scorer.example"],
        },
    },
    "groups": {
        "workload": "LeaderWorkerSet",
        "replicas": 2,
        "gpu": {"count": 0},
        "model": {"source": "pvc", "existingClaim": "weights", "path": "m"},
        "settings": {
            "log_format": "json",
            "worker": {"kv_pages": 64, "load_format": "dummy", "threads": 1},
            "limits": {"max_step_tokens": 2048, "max_items": 2000},
        },
        "leaderWorkerSet": {
            "tls": {
                "leaderSecretName": "front",
                "workerSecretName": "back",
                "issuer": {"name": "authority"},
            }
        },
    },
    "groups that scale, behind TLS": {
        "workload": "LeaderWorkerSet",
        "autoscaling": {"kind": "keda", "prometheusAddress": "http://prometheus:9090"},
        "model": {
            "source": "download",
            "download": {
                "files": [{"name": "m.gguf", "url": "https://example/m.gguf", "sha256": HASH}]
            },
        },
        "tls": {"secretName": "cert"},
        "runtimeClassName": "nvidia",
        "nodeSelector": {"gpu": "h200"},
        "leaderWorkerSet": {
            "restartPolicy": "None",
            "leader": {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "cpu"}]},
            "tls": {"allowPlaintext": True},
        },
        "monitoring": {"podMonitor": {"enabled": True}},
    },
    "hpa": {
        "autoscaling": {"kind": "hpa", "max": 6, "kvUtilization": 0.8},
        "workload": "Deployment",
        "router": {"autoscaling": {"enabled": True, "max": 3}},
        "gpu": {"resourceClaimTemplate": "one-gpu"},
        "model": {"source": "image", "image": f"models/qwen@sha256:{HASH}", "path": "m.gguf"},
    },
    "keda and monitoring": {
        "autoscaling": {
            "kind": "keda",
            "prometheusAddress": "http://prometheus:9090",
            "kvUtilization": 0.85,
        },
        "monitoring": {
            "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True},
            "dashboards": {"enabled": True},
        },
    },
    "everything else": {
        "image": {"digest": f"sha256:{HASH}", "pullSecrets": ["registry"]},
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "nodeSelector": {"gpu": "h200"},
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "search"},
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "topologySpread": False,
        "networkPolicy": {"extraEgress": [{"ports": [{"port": 3128}]}], "monitoring": []},
        "serviceAccount": {"create": False, "name": "given"},
        "podDisruptionBudget": {"enabled": False},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "fullnameOverride": "scorer",
    },
}


def changed(row: str, **values: Any) -> dict[str, Any]:
    """The values of a row of the matrix, with others."""
    return {**MATRIX[row], **values}


def render(values: Values, chart_folder: Path = CHART) -> list[Object]:
    """All objects of a release `x` in the namespace `ns`. Raises HelmError."""
    with Chart.load(chart_folder) as chart:
        files = chart.render(dict(values), name="x", namespace="ns")
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def the(objects: list[Object], kind: str, name: str = "x-stemserve") -> Object:
    """The one object of that kind and name."""
    found = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} objects {kind} {name}"
    return found[0]


def kinds(objects: list[Object]) -> set[str]:
    return {found["kind"] for found in objects}


WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")


def servers(objects: list[Object]) -> Object:
    """The Deployment, StatefulSet or LeaderWorkerSet of the servers."""
    found = [o for o in objects if o["kind"] in WORKLOADS]
    return next(o for o in found if not o["metadata"]["name"].endswith("-router"))


def templates(objects: list[Object]) -> dict[str, Object]:
    """The templates of pods by their workloads' names; a LeaderWorkerSet's workers have a name
    with -worker behind it."""
    found: dict[str, Object] = {}
    for workload in (o for o in objects if o["kind"] in WORKLOADS):
        name, spec = workload["metadata"]["name"], workload["spec"]
        if workload["kind"] == "LeaderWorkerSet":
            found[name] = spec["leaderWorkerTemplate"]["leaderTemplate"]
            found[f"{name}-worker"] = spec["leaderWorkerTemplate"]["workerTemplate"]
        else:
            found[name] = spec["template"]
    return found


def pods(objects: list[Object]) -> list[Object]:
    """The specs of all pods: servers, workers, router and test."""
    tests = [o["spec"] for o in objects if o["kind"] == "Pod"]
    return tests + [template["spec"] for template in templates(objects).values()]
