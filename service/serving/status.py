"""Errors as google.rpc.Status messages, with details that a program can read."""

import re

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from stemserve.service.errors import (
    STATUS,
    EngineFault,
    InvalidRequest,
    QueueFull,
    QuotaExceeded,
    RequestError,
)

DOMAIN = "stemserve"


def status_code(error: RequestError) -> grpc.StatusCode:
    return STATUS[type(error)]


def status_message(error: RequestError) -> status_pb2.Status:
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=_reason(error), domain=DOMAIN)]
    match error:
        case InvalidRequest():
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=error.field, description=error.problem
            )
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        case QueueFull():
            details.append(_retry(error.retry_after_s))
        case QuotaExceeded():
            violation = error_details_pb2.QuotaFailure.Violation(
                subject=error.subject, description=str(error)
            )
            details.append(error_details_pb2.QuotaFailure(violations=[violation]))
            if error.retry_after_s:
                details.append(_retry(error.retry_after_s))
        case _:
            pass
    return status_pb2.Status(
        code=status_code(error).value[0], message=str(error), details=map(_pack, details)
    )


def unexpected(error: Exception) -> EngineFault:
    """What a client may know of an error that nobody foresaw; the log has the rest."""
    return EngineFault(f"internal error ({type(error).__name__}); the server's log says more")


def _retry(after_s: float) -> error_details_pb2.RetryInfo:
    delay = duration_pb2.Duration()
    delay.FromNanoseconds(round(after_s * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _reason(error: RequestError) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).upper()


def _pack(detail: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
