"""What cert-manager is asked for: certificates of the names that are dialled."""

from typing import Any

from tests.deploy.chart import MATRIX, Object, kinds, render, templates, the
from tests.deploy.test_chart import router_cluster


def spec_of(objects: list[Object], name: str) -> Any:
    return the(objects, "Certificate", name)["spec"]


def test_the_servers_certificate_has_the_name_that_the_router_and_the_test_call() -> None:
    objects = render(MATRIX["keys over TLS"])
    spec = spec_of(objects, "x-stemserve")
    assert spec["secretName"] == "cert"
    context = router_cluster(objects)["transport_socket"]["typed_config"]
    (match,) = context["common_tls_context"]["validation_context"]["match_typed_subject_alt_names"]
    assert match["matcher"]["exact"] == context["sni"]
    assert context["sni"] in spec["dnsNames"] and "x-stemserve-servers" in spec["dnsNames"]
    call = the(objects, "Pod", "x-stemserve-test")["spec"]["containers"][0]["args"][1]
    assert call.removeprefix("--server=").partition(":")[0] in spec["dnsNames"]
    assert spec["usages"] == ["digital signature", "server auth", "client auth"]
    reference = {"name": "authority", "kind": "ClusterIssuer", "group": "cert-manager.io"}
    assert spec["issuerRef"] == reference


def test_a_workers_certificate_has_the_name_that_its_leader_dials() -> None:
    objects = render(MATRIX["groups"])
    worker, leader = (spec_of(objects, f"x-stemserve-{name}") for name in ("worker", "leader"))
    (part,) = templates(objects)["x-stemserve-group"]["spec"]["containers"]
    dialled = part["args"][-1].rpartition(":")[0]
    assert worker["dnsNames"] == ["*." + dialled.partition(".")[2]]
    assert (worker["secretName"], leader["secretName"]) == ("back", "front")
    assert worker["usages"][-1] == "server auth" and leader["usages"][-1] == "client auth"


def test_groups_may_have_an_authority_of_their_own() -> None:
    link = {"leaderSecretName": "a", "workerSecretName": "b", "issuer": {"name": "inner"}}
    values = {
        "workload": "LeaderWorkerSet",
        "tls": {"secretName": "c"},
        "certificates": {"issuer": {"name": "outer"}},
        "leaderWorkerSet": {"tls": link},
    }
    objects = render(values)
    names = {"x-stemserve": "outer", "x-stemserve-leader": "inner", "x-stemserve-worker": "inner"}
    assert {name: spec_of(objects, name)["issuerRef"]["name"] for name in names} == names
    shared = render({**values, "leaderWorkerSet": {"tls": {**link, "issuer": {"name": ""}}}})
    assert spec_of(shared, "x-stemserve-worker")["issuerRef"]["name"] == "outer"


def test_without_an_issuer_there_are_none() -> None:
    assert "Certificate" not in kinds(render(MATRIX["tokens"]))
