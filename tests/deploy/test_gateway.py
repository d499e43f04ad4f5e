"""What the chart makes for Envoy Gateway: routing as its own Envoy does."""

import pytest
from tests.deploy.chart import MATRIX, Object, kinds, render, the
from tests.deploy.test_chart import router_cluster


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render(MATRIX["gateway"])


def test_a_route_leads_from_the_gateway_to_the_servers(objects: list[Object]) -> None:
    spec = the(objects, "GRPCRoute")["spec"]
    assert spec["parentRefs"] == [{"name": "gate"}] and "hostnames" not in spec
    ((backend,),) = [rule["backendRefs"] for rule in spec["rules"]]
    service = the(objects, "Service", backend["name"])["spec"]
    assert backend["port"] in [port["port"] for port in service["ports"]]
    assert service["clusterIP"] == "None"


def test_it_hashes_checks_and_tries_again_as_the_charts_own_envoy(objects: list[Object]) -> None:
    spec = the(objects, "BackendTrafficPolicy")["spec"]
    ours = router_cluster(render({}))
    (target,) = spec["targetRefs"]
    assert (target["kind"], target["name"]) == ("GRPCRoute", "x-stemserve")
    hashing = spec["loadBalancer"]["consistentHash"]
    assert hashing["headers"] == [{"name": "x-prefix-id"}]
    assert hashing["tableSize"] == ours["maglev_lb_config"]["table_size"]
    (check,) = ours["health_checks"]
    active = spec["healthCheck"]["active"]
    assert active["grpc"]["service"] == check["grpc_health_check"]["service_name"]
    assert (active["interval"], active["timeout"]) == (check["interval"], check["timeout"])
    assert spec["circuitBreaker"]["maxParallelRequests"] == 4096
    assert spec["timeout"] == {"http": {"requestTimeout": "0s"}}


def test_no_envoy_of_ours_stands_beside_it(objects: list[Object]) -> None:
    assert "Deployment" not in kinds(objects) and "InferencePool" not in kinds(objects)
    service = the(objects, "Service")
    assert service["spec"]["selector"]["app.kubernetes.io/component"] == "server"
    assert "BackendTrafficPolicy" not in kinds(render(MATRIX["inference pool"]))
