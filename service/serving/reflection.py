"""Answer gRPC reflection, so that grpcurl works without our .proto files."""

from collections.abc import Sequence
from typing import Any, cast

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"
V1ALPHA = reflection.SERVICE_NAME


def handlers(services: Sequence[str]) -> tuple[grpc.GenericRpcHandler, ...]:
    """Both versions. Their messages are the same bytes; the library only knows the older name."""
    # The library's stubs leave the method half typed.
    servicer = cast(Any, reflection.aio.ReflectionServicer([*services, V1, V1ALPHA]))
    method: Any = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return tuple(
        grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method})
        for name in (V1, V1ALPHA)
    )
