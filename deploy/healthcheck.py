"""Exit with 0 if a server would take a call: `healthcheck.py [[HOST:]PORT]`, by default here."""

import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

HERE = "127.0.0.1"
HEALTH_PORT = "50052"
TIMEOUT_S = 4.0


def main(address: str) -> None:
    host, _, port = address.rpartition(":")
    request = HealthCheckRequest(service="stemserve.v1.Inference")
    with grpc.insecure_channel(f"{host or HERE}:{port}") as channel:
        try:
            status = HealthStub(channel).Check(request, timeout=TIMEOUT_S).status
        except grpc.RpcError as error:
            sys.exit(str(error))
    name = HealthCheckResponse.ServingStatus.Name(status)
    sys.exit(0 if status == HealthCheckResponse.SERVING else name)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else HEALTH_PORT)
