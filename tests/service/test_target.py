"""Which addresses are called: never port 443 for want of another."""

import pytest

from stemserve.service.client import Client
from stemserve.service.config.error import ConfigError
from stemserve.service.config.server import WorkerConfig
from stemserve.service.target import check_target


@pytest.mark.parametrize(
    "target",
    [
        "localhost:50051",
        "10.0.0.7:1",
        "[::1]:65535",
        "[fe80::1%25eth0]:50051",
        "scorer_0.scorer-servers.ns.svc.cluster.local:50051",
        "unix:/run/stemserve.sock",
        "unix:///run/stemserve.sock",
        "unix-abstract:stemserve",
        "dns:///scorer:50051",
        "dns://8.8.8.8/scorer:50051",
        "dns:scorer:50051",
        "ipv4:10.0.0.1:50051,10.0.0.2:50051",
        "ipv6:[::1]:50051,[::2]:50051",
        "xds:///scorer",
    ],
)
async def test_addresses_that_grpc_knows_are_taken(target: str) -> None:
    check_target(target)
    async with Client(target):
        pass
    assert WorkerConfig(address=target).address == target


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("localhost", "has no port; give HOST:PORT, as localhost:50051"),
        ("[::1]", "has no port"),
        ("dns:///scorer", "has no port"),
        ("ipv4:10.0.0.1:50051,10.0.0.2", "has no port"),
        ("::1", r"is not HOST:PORT, as localhost:50051; an IPv6 address stands in \[ \]"),
        ("::1:50051", r"an IPv6 address stands in \[ \]"),
        ("", "is not HOST:PORT"),
        (":50051", "is not HOST:PORT"),
        ("localhost:", "is not HOST:PORT"),
        ("localhost:http", "is not HOST:PORT"),
        ("localhost:50051/", "is not HOST:PORT"),
        ("localhost :50051", "is not HOST:PORT"),
        ("localhost:0", "port 0 is not in 1 .. 65535"),
        ("localhost:115587", "port 115587 is not in 1 .. 65535"),
        ("http://localhost:50051", "has a scheme; give HOST:PORT"),
        ("HTTPS://localhost", "has a scheme; give HOST:PORT"),
    ],
)
def test_others_are_refused_before_any_call(target: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Client(target)
    with pytest.raises(ConfigError, match=f"^address .*{problem}"):
        WorkerConfig(address=target)
