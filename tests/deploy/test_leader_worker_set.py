"""A replica of two pods: what the chart makes for the LeaderWorkerSet operator."""

import json
import tomllib
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from helm_python.errors import HelmError
from tests.deploy.chart import (
    MATRIX,
    ROOT,
    Object,
    Values,
    changed,
    render,
    servers,
    templates,
    the,
)
from tests.deploy.test_chart import KUBERNETES, router_cluster

ROWS = [row for row in MATRIX if MATRIX[row].get("workload") == "LeaderWorkerSet"]
SCHEMA = json.loads((ROOT / "tests/deploy/leaderworkerset_spec.json").read_text())
GROUP = "x-stemserve-group"

each_row = pytest.mark.parametrize("row", ROWS)


def group(row: str) -> tuple[Object, Object]:
    """The templates of the leader and of the worker."""
    found = templates(render(MATRIX[row]))
    return found[GROUP], found[f"{GROUP}-worker"]


def container(template: Object) -> Object:
    (found,) = template["spec"]["containers"]
    part: Object = found
    return part


@each_row
def test_the_set_is_what_its_operator_knows(row: str) -> None:
    found = servers(render(MATRIX[row]))
    assert (found["apiVersion"], found["kind"]) == (
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
    )
    jsonschema.validate(found["spec"], SCHEMA)
    assert found["spec"]["leaderWorkerTemplate"]["size"] == 2
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found["spec"] | {"replica": 2}, SCHEMA)


@each_row
def test_its_pods_are_what_kubernetes_knows(row: str) -> None:
    for template in group(row):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        pod["metadata"] = template["metadata"] | {"name": "x"}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@each_row
def test_a_leader_has_no_gpu_and_stays_off_its_nodes(row: str) -> None:
    leader, worker = group(row)
    assert "nvidia.com/gpu" not in container(leader)["resources"]["limits"]
    assert "runtimeClassName" not in leader["spec"]
    on_gpu = MATRIX[row].get("gpu", {}).get("count", 1)
    assert container(worker)["resources"]["limits"].get("nvidia.com/gpu", 0) == on_gpu
    assert worker["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "nvidia.com/gpu" not in str(leader["spec"].get("tolerations"))


def test_each_pod_is_placed_by_its_own_values() -> None:
    leader, worker = group("groups that scale, behind TLS")
    assert leader["spec"]["nodeSelector"] == {"pool": "cpu"}
    assert leader["spec"]["tolerations"] == [{"key": "cpu"}]
    assert worker["spec"]["nodeSelector"] == {"gpu": "h200"}
    assert worker["spec"]["runtimeClassName"] == "nvidia"
    (wish,) = worker["spec"]["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    near = wish["podAffinityTerm"]
    assert near["labelSelector"]["matchLabels"].items() <= leader["metadata"]["labels"].items()
    assert near["matchLabelKeys"] == ["leaderworkerset.sigs.k8s.io/group-index"]
    given = render(changed("groups", affinity={"nodeAffinity": {}}))
    assert templates(given)[f"{GROUP}-worker"]["spec"]["affinity"] == {"nodeAffinity": {}}
    assert "affinity" not in templates(given)[GROUP]["spec"]


def test_a_leader_dials_its_own_worker_by_name() -> None:
    """LeaderWorkerSet names worker 1 of the group NAME-0 NAME-0-1, in a headless Service NAME."""
    leader, worker = group("groups")
    words = container(leader)["args"]
    assert words[-2:] == ["--worker", f"$(POD_NAME)-1.{GROUP}.ns.svc:50061"]
    name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert container(leader)["env"][0] == name
    ports = {port["name"]: port["containerPort"] for port in container(worker)["ports"]}
    assert ports == {"worker": 50061, "health": 50052}
    assert not [o for o in render(MATRIX["groups"]) if o["metadata"]["name"] == GROUP][1:]


def test_both_pods_have_the_model_and_their_half_of_the_settings() -> None:
    objects = render(MATRIX["groups"])
    for template in group("groups"):
        mounts = {m["name"]: m["mountPath"] for m in container(template)["volumeMounts"]}
        assert mounts["models"] == "/models"
    files = the(objects, "ConfigMap")["data"]
    front, back = (tomllib.loads(files[name]) for name in ("stemserve.toml", "worker.toml"))
    assert front["model"] == back["model"] == "/models/m"
    assert front["worker"]["tls_ca"] == "/etc/stemserve-worker-tls/ca.crt"
    assert back["worker"] == {
        **{"device": "cpu", "kv_pages": 64, "load_format": "dummy", "threads": 1},
        "start_timeout_s": 1200,
    }
    assert back["limits"] == {"max_step_tokens": 2048} and back["log_format"] == "json"
    assert not {"server", "tls", "auth", "tenants"} & back.keys()
    assert "worker.toml" not in the(render({}), "ConfigMap")["data"]


def test_each_pod_has_its_own_secret() -> None:
    leader, worker = group("groups")
    for template, name in ((leader, "front"), (worker, "back")):
        volumes = [v["secret"] for v in template["spec"]["volumes"] if "secret" in v]
        assert volumes == [{"secretName": name, "defaultMode": 0o440}]
    flags = [word.partition("=")[0] for word in container(worker)["args"][1:]]
    assert flags == [
        *("--config", "--listen", "--health-listen"),
        *("--tls-certificate", "--tls-private-key", "--tls-client-ca"),
    ]
    plain = container(group("groups that scale, behind TLS")[1])["args"]
    assert not [word for word in plain if "tls" in word]


def test_probes_of_a_worker_ask_its_own_services() -> None:
    part = container(group("groups")[1])
    assert part["startupProbe"]["grpc"] == {"port": 50052}
    assert part["startupProbe"]["failureThreshold"] == 240
    assert part["livenessProbe"]["grpc"] == {"port": 50052, "service": "liveness"}
    assert part["readinessProbe"]["grpc"] == {"port": 50052, "service": "stemserve.v1.Worker"}


def test_only_leaders_reach_a_worker_and_a_worker_reaches_nobody() -> None:
    objects = render(MATRIX["groups"])
    leader, worker = group("groups")
    policy = the(objects, "NetworkPolicy", "x-stemserve-worker")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"].items() <= leader["metadata"]["labels"].items()
    assert rule["ports"] == [{"port": "worker"}] and policy["egress"] == []
    fetching = render(MATRIX["groups that scale, behind TLS"])
    egress = the(fetching, "NetworkPolicy", "x-stemserve-worker")["spec"]["egress"]
    assert egress[1:] == [{"ports": [{"port": 443}]}]


def test_only_leaders_are_servers() -> None:
    """Services, monitors, budgets and policies of the servers find the leader by its label."""
    leader, worker = group("groups")
    component = "app.kubernetes.io/component"
    assert leader["metadata"]["labels"][component] == "server"
    assert worker["metadata"]["labels"][component] == "worker"
    objects = render(MATRIX["groups"])
    for name, chosen in (("x-stemserve", "server"), ("x-stemserve-worker", "worker")):
        budget = the(objects, "PodDisruptionBudget", name)["spec"]
        assert budget["selector"]["matchLabels"][component] == chosen
        assert budget["maxUnavailable"] == 1


def test_the_set_is_what_scales() -> None:
    objects = render(MATRIX["groups that scale, behind TLS"])
    target = the(objects, "ScaledObject")["spec"]["scaleTargetRef"]
    found = servers(objects)
    assert target == {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "name": found["metadata"]["name"],
    }
    assert "replicas" not in found["spec"]
    assert found["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"


def test_the_router_knows_leaders_by_their_names() -> None:
    cluster = router_cluster(render(MATRIX["groups"]))
    endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert [end["endpoint"]["hostname"] for end in endpoints] == [
        f"{GROUP}-{i}.{GROUP}.ns.svc" for i in range(2)
    ]
    assert cluster["common_lb_config"]["consistent_hashing_lb_config"]["use_hostname_for_hashing"]


def test_a_changed_setting_of_the_worker_replaces_its_pod() -> None:
    def note(settings: Any) -> Any:
        values = changed("groups", settings=settings)
        return templates(render(values))[f"{GROUP}-worker"]["metadata"]["annotations"]

    assert note({}) != note({"worker": {"kv_pages": 65}})
    assert note({}) == note({"limits": {"max_items": 5}})


TLS: Values = {"leaderSecretName": "a", "workerSecretName": "b"}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "workerSecretName"),
        ({"leaderWorkerSet": {"tls": {"leaderSecretName": "a"}}}, "go together"),
        ({"leaderWorkerSet": {"tls": TLS, "restartPolicy": "Always"}}, "restartPolicy"),
        ({"leaderWorkerSet": {"tls": TLS, "leader": {"gpu": 1}}}, "gpu"),
        ({"leaderWorkerSet": {"tls": TLS}, "updateStrategy": {"maxSurge": 1}}, "maxSurge"),
        ({"leaderWorkerSet": {"tls": TLS}, "fullnameOverride": "x" * 43}, "42 characters"),
    ],
)
def test_a_group_that_cannot_work_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmError, match=named):
        render({"workload": "LeaderWorkerSet"} | values)


def test_names_stay_within_what_labels_may_have() -> None:
    values = changed("groups", fullnameOverride="x" * 42)
    name = servers(render(values))["metadata"]["name"]
    revision = f"{name}-999-{'f' * 10}"  # the label of a worker's StatefulSet
    assert len(revision) <= 63
