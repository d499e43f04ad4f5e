"""The error of a failed call, with the server's details decoded."""

from collections.abc import Mapping
from types import MappingProxyType

import grpc
from google.rpc import error_details_pb2, status_pb2

from stemserve.service.metadata_keys import STATUS_DETAILS_KEY

# What gRPC says where nobody listens, at a host and at a Unix socket.
_NOBODY = ("Failed to connect to remote host", "connect failed: ")
NO_SERVER = "is a server running there? `stemserve serve` starts one"
# What gRPC's client says where a connection ends while it sends messages, whatever the server said.
_CUT_WHILE_SENDING = "Internal error from Core"

NO_VIOLATIONS: Mapping[str, str] = MappingProxyType({})


class ClientError(Exception):
    """`code` says what kind of failure it was, `violations` what is wrong with which field."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: Mapping[str, str] = NO_VIOLATIONS,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_s = retry_after_s


def client_error(error: grpc.aio.AioRpcError) -> ClientError:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            return status_error(status_pb2.Status.FromString(value))
    message = error.details() or "no reason was given"
    if error.code() is grpc.StatusCode.INTERNAL and message == _CUT_WHILE_SENDING:
        message = "the connection ended while the call was sent; retry"
        return ClientError(grpc.StatusCode.UNAVAILABLE, message)
    if error.code() is grpc.StatusCode.UNAVAILABLE and any(words in message for words in _NOBODY):
        message = f"{message}; {NO_SERVER}"
    return ClientError(error.code(), message)


def status_error(status: status_pb2.Status) -> ClientError:
    reason, retry_after_s, violations = "", None, dict[str, str]()
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        bad_request = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad_request):
            violations = {v.field: v.description for v in bad_request.field_violations}
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return ClientError(
        CODES.get(status.code, grpc.StatusCode.UNKNOWN),
        status.message,
        reason=reason,
        violations=violations,
        retry_after_s=retry_after_s,
    )


CODES = {code.value[0]: code for code in grpc.StatusCode}
