"""Imported before gRPC: it then writes errors of its own only, no lines beside ours.

Each failed handshake would else be a line on standard error that nobody asked for.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
