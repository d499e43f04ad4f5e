"""Flags of a worker alone, which a server and probes reach over a network."""

import argparse
from pathlib import Path

from stemserve.worker.argument_types import seconds

STEP_TIMEOUT_S = 300.0


def add_tls(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TLS of --listen HOST:PORT, with files in PEM")
    group.add_argument("--tls-certificate", type=Path, metavar="FILE", help="of this worker")
    group.add_argument("--tls-private-key", type=Path, metavar="FILE", help="of the certificate")
    group.add_argument(
        "--tls-client-ca",
        type=Path,
        metavar="FILE",
        help="refuse services without a certificate that this signed",
    )


def add_health(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("health, of a worker alone")
    group.add_argument(
        "--health-listen",
        metavar="HOST:PORT",
        help="answer grpc.health.v1 there too, in plaintext, for probes (default: nowhere)",
    )
    group.add_argument(
        "--step-timeout",
        dest="step_timeout_s",
        type=seconds,
        default=STEP_TIMEOUT_S,
        metavar="SECONDS",
        help="a step that has run for so long makes liveness NOT_SERVING (default: %(default)g)",
    )
