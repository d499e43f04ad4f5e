"""What the chart makes for a gateway with the Gateway API inference extension."""

from typing import Any

import pytest
import yaml
from helm_python.errors import HelmError
from tests.deploy.chart import MATRIX, Object, kinds, render, servers, the
from tests.deploy.expressions import exported

ROW = MATRIX["inference pool"]


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render(ROW)


def test_the_pool_is_of_the_servers_and_asks_the_picker(objects: list[Object]) -> None:
    spec = the(objects, "InferencePool")["spec"]
    labels = servers(objects)["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    (part,) = servers(objects)["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in part["ports"]}
    assert spec["targetPorts"] == [{"number": ports["grpc"]}]
    assert spec["appProtocol"] == "kubernetes.io/h2c"
    picker = {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
    assert spec["endpointPickerRef"] == picker


def test_a_route_leads_from_the_gateway_to_the_pool(objects: list[Object]) -> None:
    spec = the(objects, "GRPCRoute")["spec"]
    assert spec["parentRefs"] == [{"name": "gate", "namespace": "gates", "sectionName": "grpc"}]
    assert spec["hostnames"] == ["scorer.example"]
    ((backend,),) = [rule["backendRefs"] for rule in spec["rules"]]
    assert backend["kind"] == "InferencePool" and backend["name"] == "x-stemserve"
    bare = {"endpointPicker": {"service": "picker"}}
    without = render({"router": {"mode": "inferencePool"}, "inferencePool": bare})
    assert "GRPCRoute" not in kinds(without) and "InferencePool" in kinds(without)


def test_the_picker_reads_metrics_that_servers_have(objects: list[Object]) -> None:
    config = picker_config(objects)
    parameters = {plugin["type"]: plugin.get("parameters", {}) for plugin in config["plugins"]}
    (engine,) = parameters["core-metrics-extractor"]["engineConfigs"]
    labels = servers(objects)["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == engine["name"] == "stemserve"
    named = {value for key, value in engine.items() if key.endswith("Spec") and value}
    assert named <= exported() and len(named) == 4
    affinity = parameters["session-affinity-scorer"]
    assert affinity["sessionIdConfig"]["sources"] == [{"header": "x-prefix-id"}]


def test_the_picker_uses_only_plugins_that_it_declares(objects: list[Object]) -> None:
    config = picker_config(objects)
    declared = {plugin["type"] for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    used = {plugin["pluginRef"]: plugin.get("weight") for plugin in profile["plugins"]}
    assert used.keys() <= declared
    assert used["session-affinity-scorer"] == 2 and used["kv-cache-utilization-scorer"] == 1
    assert {parser["pluginRef"] for parser in config["requestHandler"]["parsers"]} <= declared


def picker_config(objects: list[Object]) -> Any:
    return yaml.safe_load(
        the(objects, "ConfigMap", "x-stemserve-endpoint-picker")["data"]["config.yaml"]
    )


def test_no_envoy_of_ours_stands_before_a_pool(objects: list[Object]) -> None:
    service = the(objects, "Service")
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "server"
    assert "Deployment" not in kinds(objects)
    assert "llm-d.ai/engine-type" not in str(render({}))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "endpointPicker.service"),
        ({"tls": {"secretName": "cert"}, "inferencePool": ROW["inferencePool"]}, "tls.secretName"),
        ({"inferencePool": {"failureMode": "FailMaybe"}}, "failureMode"),
        ({"inferencePool": {"endpointPicker": {"port": 0}}}, "port"),
    ],
)
def test_a_pool_that_cannot_work_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(HelmError, match=named):
        render({"router": {"mode": "inferencePool"}} | values)
