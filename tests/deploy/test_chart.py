"""The objects that the Helm chart makes, over many values."""

import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import lint
from tests.deploy.chart import (
    CHART,
    MATRIX,
    ROOT,
    Object,
    kinds,
    pods,
    render,
    servers,
    templates,
    the,
)

CUSTOM = {
    "ScaledObject",
    "PodMonitor",
    "PrometheusRule",
    "InferencePool",
    "GRPCRoute",
    "BackendTrafficPolicy",
    "LeaderWorkerSet",
    "Certificate",
}  # their schemas are the operators'
KUBERNETES = "1.33"

each_row = pytest.mark.parametrize("row", MATRIX)


def container(objects: list[Object]) -> Object:
    found: Object = servers(objects)["spec"]["template"]["spec"]["containers"][0]
    return found


@each_row
def test_helm_lint_finds_nothing(row: str) -> None:
    report = lint(CHART, dict(MATRIX[row]), strict=True)
    severe = [message for message in report["messages"] if message["severity"] > 1]
    assert not report["errors"] and not severe, report


@each_row
def test_objects_are_what_kubernetes_knows(row: str) -> None:
    for found in render(MATRIX[row]):
        if found["kind"] not in CUSTOM:
            kubernetes_validate.validate(found, KUBERNETES, strict=True)


@each_row
def test_pods_are_restricted(row: str) -> None:
    """The "restricted" pod security standard, and more: a read-only root, no token, limits."""
    for pod in pods(render(MATRIX[row])):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for part in [*pod["containers"], *pod.get("initContainers", [])]:
            assert part["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert part["resources"]["requests"] and part["resources"]["limits"]["memory"]
            assert re.search(r"(:[^:/]+|@sha256:[0-9a-f]{64})$", part["image"])
            assert not part["image"].endswith(":latest")


@each_row
def test_volumes_are_mounted_and_mounts_have_volumes(row: str) -> None:
    for pod in pods(render(MATRIX[row])):
        parts = [*pod["containers"], *pod.get("initContainers", [])]
        mounted = {mount["name"] for part in parts for mount in part["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


@each_row
def test_no_mount_lies_inside_another(row: str) -> None:
    """The kubelet could not make its folder in a read-only volume."""
    for pod in pods(render(MATRIX[row])):
        for part in pod["containers"]:
            paths = [mount["mountPath"] for mount in part["volumeMounts"]]
            assert not [(a, b) for a in paths for b in paths if b.startswith(f"{a}/")]


@each_row
def test_selectors_find_the_pods_they_mean(row: str) -> None:
    objects = render(MATRIX[row])
    found = templates(objects)
    for workload in (o for o in objects if o["kind"] in ("Deployment", "StatefulSet")):
        match = workload["spec"]["selector"]["matchLabels"]
        assert match.items() <= found[workload["metadata"]["name"]]["metadata"]["labels"].items()
    for each in objects:
        spec: Object = each.get("spec", {})
        selector: Object = spec.get("podSelector") or spec.get("selector") or {}
        if each["kind"] not in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
            continue
        ports = [port["targetPort"] for port in spec.get("ports", [])]
        ports += [port["port"] for rule in spec.get("ingress", []) for port in rule["ports"]]
        ports += [end["port"] for end in spec.get("podMetricsEndpoints", [])]
        assert set(ports) <= ports_of(found, selector.get("matchLabels", selector))
        for rule in (rule for rule in spec.get("egress", []) if "to" in rule):
            (peer,) = rule["to"]
            ports = [port["port"] for port in rule["ports"]]
            assert set(ports) <= ports_of(found, peer["podSelector"]["matchLabels"])


def ports_of(found: dict[str, Object], wanted: dict[str, str]) -> set[str]:
    """The names of the ports of the one workload that the labels choose."""
    chosen = [t for t in found.values() if wanted.items() <= t["metadata"]["labels"].items()]
    assert len(chosen) == 1, wanted
    return {port["name"] for port in chosen[0]["spec"]["containers"][0]["ports"]}


def test_probes_ask_the_plaintext_health_port() -> None:
    found = container(render({"probes": {"startupSeconds": 601}}))
    assert found["startupProbe"] | {"timeoutSeconds": 0} == {
        "grpc": {"port": 50052},
        "periodSeconds": 5,
        "timeoutSeconds": 0,
        "failureThreshold": 121,
    }
    assert found["livenessProbe"]["grpc"] == {"port": 50052, "service": "liveness"}
    assert found["readinessProbe"]["grpc"] == {"port": 50052, "service": "stemserve.v1.Inference"}


def test_a_gpu_is_a_limit_and_a_cpu_server_asks_for_none() -> None:
    assert container(render({}))["resources"]["limits"]["nvidia.com/gpu"] == 1
    other = render({"gpu": {"resource": "nvidia.com/mig-3g.71gb"}})
    assert container(other)["resources"]["limits"]["nvidia.com/mig-3g.71gb"] == 1
    limits = container(render(MATRIX["cpu"]))["resources"]["limits"]
    assert set(limits) == {"memory"}


def test_a_gpu_may_be_a_claim() -> None:
    objects = render(MATRIX["hpa"])
    claim = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}
    assert servers(objects)["spec"]["template"]["spec"]["resourceClaims"] == [claim]
    resources = container(objects)["resources"]
    assert resources["claims"] == [{"name": "gpu"}] and set(resources["limits"]) == {"memory"}


def test_weights_may_be_an_image() -> None:
    objects = render(MATRIX["hpa"])
    volumes = servers(objects)["spec"]["template"]["spec"]["volumes"]
    image = {"reference": MATRIX["hpa"]["model"]["image"], "pullPolicy": "IfNotPresent"}
    assert {"name": "models", "image": image} in volumes


def test_a_router_stands_before_the_servers_unless_it_is_off() -> None:
    routed = render({})
    service = the(routed, "Service")
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "router"
    rule = the(routed, "NetworkPolicy")["spec"]["ingress"][0]
    assert rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
    direct = render({"router": {"mode": "none"}})
    service = the(direct, "Service")
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "server"
    assert "Deployment" not in kinds(direct)
    assert the(direct, "NetworkPolicy")["spec"]["ingress"][0]["from"] == [{"podSelector": {}}]
    assert the(direct, "Service", "x-stemserve-servers")["spec"]["clusterIP"] == "None"


def test_the_router_hashes_a_stateful_set_by_names_and_a_deployment_by_addresses() -> None:
    named = router_cluster(render({"autoscaling": {"kind": "hpa", "max": 3}}))
    endpoints = named["load_assignment"]["endpoints"][0]["lb_endpoints"]
    names = [end["endpoint"]["address"]["socket_address"]["address"] for end in endpoints]
    assert names == [f"x-stemserve-{i}.x-stemserve-servers.ns.svc" for i in range(3)]
    assert named["common_lb_config"]["consistent_hashing_lb_config"]["use_hostname_for_hashing"]
    plain = router_cluster(render({"workload": "Deployment", "replicas": 3}))
    (end,) = plain["load_assignment"]["endpoints"][0]["lb_endpoints"]
    address = end["endpoint"]["address"]["socket_address"]["address"]
    assert address == "x-stemserve-servers.ns.svc"


def router_cluster(objects: list[Object]) -> Any:
    config = yaml.safe_load(the(objects, "ConfigMap", "x-stemserve-router")["data"]["envoy.yaml"])
    return next(c for c in config["static_resources"]["clusters"] if c["name"] == "servers")


def test_budgets_are_for_several_replicas_only() -> None:
    budgets = [o for o in render({}) if o["kind"] == "PodDisruptionBudget"]
    assert [o["metadata"]["name"] for o in budgets] == ["x-stemserve-router"]
    assert the(render({"replicas": 2}), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    scaled = render({"autoscaling": {"kind": "hpa", "max": 2}})
    assert the(scaled, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_scaling_follows_queued_tokens_and_goes_down_slowly() -> None:
    objects = render({"autoscaling": {"kind": "hpa", "waitingTokensPerReplica": 2_000_000}})
    spec = the(objects, "HorizontalPodAutoscaler")["spec"]
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == "stemserve_waiting_tokens"
    assert metric["pods"]["target"]["averageValue"] == "2000000"
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600
    assert spec["scaleTargetRef"]["kind"] == servers(objects)["kind"]
    assert "replicas" not in servers(objects)["spec"]
    objects = render(MATRIX["keda and monitoring"])
    trigger = the(objects, "ScaledObject")["spec"]["triggers"][0]["metadata"]
    assert trigger["query"].startswith("sum(stemserve_waiting_tokens{")
    assert trigger["ignoreNullValues"] == "false"
    assert trigger["threshold"] == "50000"


def test_a_full_cache_may_be_a_second_signal() -> None:
    tokens, cache = the(render(MATRIX["keda and monitoring"]), "ScaledObject")["spec"]["triggers"]
    assert cache["metricType"] == "Value" and "metricType" not in tokens
    assert cache["metadata"]["query"].startswith("max(stemserve_kv_utilization_ratio{")
    assert cache["metadata"]["threshold"] == "0.85"
    scaler = the(render(MATRIX["hpa"]), "HorizontalPodAutoscaler")["spec"]
    names = [metric["pods"]["metric"]["name"] for metric in scaler["metrics"]]
    assert names == ["stemserve_waiting_tokens", "stemserve_kv_utilization_ratio"]
    assert scaler["metrics"][1]["pods"]["target"]["averageValue"] == "800m"
    assert (
        len(
            the(render({"autoscaling": {"kind": "hpa"}}), "HorizontalPodAutoscaler")["spec"][
                "metrics"
            ]
        )
        == 1
    )


def test_the_router_may_scale_with_its_processors() -> None:
    objects = render(MATRIX["hpa"])
    scaler = the(objects, "HorizontalPodAutoscaler", "x-stemserve-router")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 3)
    assert scaler["scaleTargetRef"]["name"] == "x-stemserve-router"
    assert "replicas" not in the(objects, "Deployment", "x-stemserve-router")["spec"]
    assert the(render({}), "Deployment", "x-stemserve-router")["spec"]["replicas"] == 2


def test_servers_may_reach_out_only_for_a_model_and_with_traces() -> None:
    def egress(row: str) -> Any:
        return the(render(MATRIX[row]), "NetworkPolicy")["spec"]["egress"]

    assert egress("node folder") == []
    assert egress("volume")[1:] == [{"ports": [{"port": 4317}]}]
    tls = {"settings": {"tracing": {"otlp_endpoint": "https://collector"}}}
    assert {"ports": [{"port": 443}]} in the(render(tls), "NetworkPolicy")["spec"]["egress"]
    assert {"ports": [{"port": 443}]} in egress("download")
    assert "NetworkPolicy" not in kinds(render({"networkPolicy": {"enabled": False}}))


def test_secrets_are_named_and_never_held() -> None:
    for row, values in MATRIX.items():
        assert "Secret" not in kinds(render(values)), row
    objects = render(MATRIX["keys over TLS"])
    volumes = servers(objects)["spec"]["template"]["spec"]["volumes"]
    assert {"name": "tls", "secret": {"secretName": "cert", "defaultMode": 0o440}} in volumes
    objects = render(MATRIX["download"])
    fetch = servers(objects)["spec"]["template"]["spec"]["initContainers"][0]
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert fetch["env"] == [{"name": "MODEL_TOKEN", "valueFrom": reference}]


def test_a_changed_setting_replaces_the_pods() -> None:
    def note(values: dict[str, Any]) -> Any:
        return servers(render(values))["spec"]["template"]["metadata"]["annotations"]

    assert note({}) != note({"settings": {"limits": {"max_items": 5}}})
    assert note({}) == note({"replicas": 2})


def test_rules_and_dashboards_are_the_ones_of_the_repository() -> None:
    """The chart's are links, which Helm follows when it packs the chart."""
    links = [*CHART.glob("files/rules/*"), *CHART.glob("files/dashboards/*")]
    held_here = [ROOT / "deploy/prometheus/rules.yaml", *ROOT.glob("deploy/grafana/*.json")]
    assert all(link.is_symlink() for link in links)
    assert sorted(link.resolve() for link in links) == sorted(held_here)
    objects = render(MATRIX["keda and monitoring"])
    rules, *dashboards = held_here
    groups = the(objects, "PrometheusRule")["spec"]["groups"]
    assert groups == yaml.safe_load(rules.read_text())["groups"]
    served = {"prometheusRule": {"enabled": True, "runbooks": "https://wiki/pages/"}}
    (first, *_) = the(render({"monitoring": served}), "PrometheusRule")["spec"]["groups"][1][
        "rules"
    ]
    url = f"https://wiki/pages/{first['alert']}.md"
    assert first["annotations"]["runbook_url"] == url
    data = the(objects, "ConfigMap", "x-stemserve-dashboards")["data"]
    assert {name: json.loads(text) for name, text in data.items()} == {
        file.name: json.loads(file.read_text()) for file in dashboards
    }
