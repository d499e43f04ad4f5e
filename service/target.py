"""Addresses that gRPC calls: HOST:PORT, or a URI of a scheme that it knows."""

import re

_WITHOUT_PORTS = ("unix:", "unix-abstract:", "xds:", "google-c2p:")
_LISTS = ("ipv4:", "ipv6:")  # of endpoints, with commas between them
_DNS = re.compile(r"dns:(?://[^/]*/)?")
_URL = re.compile(r"(?i)(https?|grpcs?)://")
_ENDPOINT = re.compile(r"(\[[^\[\]]+\]|[^:/\[\]\s]+)(?::(\d+))?")
EXAMPLE = "localhost:50051"


def check_target(target: str) -> None:
    """Raises ValueError, which says what to give.

    gRPC would take port 443 where there is none, and the rest of a port above 65535.
    """
    if target.startswith(_WITHOUT_PORTS):
        return
    if _URL.match(target):
        raise ValueError(f"{target!r} has a scheme; give HOST:PORT, as {EXAMPLE}")
    lists = next((scheme for scheme in _LISTS if target.startswith(scheme)), "")
    dns = _DNS.match(target)
    named = target[len(lists) if dns is None else dns.end() :]
    for endpoint in named.split(",") if lists else [named]:
        found = _ENDPOINT.fullmatch(endpoint)
        if found is None:
            brackets = "; an IPv6 address stands in [ ]" if endpoint.count(":") > 1 else ""
            raise ValueError(f"{target!r} is not HOST:PORT, as {EXAMPLE}{brackets}")
        if found[2] is None:
            raise ValueError(f"{target!r} has no port; give HOST:PORT, as {EXAMPLE}")
        if not 1 <= int(found[2]) <= 65535:
            raise ValueError(f"{target!r}: port {found[2]} is not in 1 .. 65535")
