"""Which peers can run here, and why the others cannot."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from decode_engines import Engine

FLASHINFER = ("fi_decode", "fi_batch", "xqa", "cascade_auto", "cascade_fa2")
PEERS = (*FLASHINFER, "fa3", "flex", "fasttree", "codec_public")


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    fa3: Path | None  # _vllm_fa3_C.abi3.so of vLLM
    fasttree: Path | None  # checkouts
    codec: Path | None
    flex: bool


def find_peers(options: PeerOptions) -> tuple[list[Engine], dict[str, str]]:
    """Engines, and a reason for each peer that is missing."""
    found: list[Engine] = []
    missing: dict[str, str] = {}
    try:
        from paged_peers import flashinfer_peers

        found += flashinfer_peers()
    except ImportError as error:
        missing |= dict.fromkeys(FLASHINFER, f"FlashInfer is not installed ({error})")
    for name, make, reason in _optional(options):
        if make is None:
            missing[name] = reason
            continue
        try:
            found.append(make())
        except (ImportError, OSError) as error:
            missing[name] = f"could not be loaded: {error}"
    return found, missing


def _optional(options: PeerOptions) -> list[tuple[str, Callable[[], Engine] | None, str]]:
    from flex_peer import flex_peer
    from paged_peers import fa3_peer
    from public_peers import codec_peer, fasttree_peer

    fa3, fasttree, codec = options.fa3, options.fasttree, options.codec
    return [
        ("fa3", (lambda: fa3_peer(fa3)) if fa3 else None, "not given (--fa3 FILE)"),
        ("flex", flex_peer if options.flex else None, "left out (--flex)"),
        (
            "fasttree",
            (lambda: fasttree_peer(fasttree)) if fasttree else None,
            "not given (--fasttree-src DIR)",
        ),
        (
            "codec_public",
            (lambda: codec_peer(codec)) if codec else None,
            "not given (--codec-src DIR)",
        ),
    ]
