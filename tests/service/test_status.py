"""Each error as a status, and back in the client."""

import pytest

from stemserve.service.client.errors import status_error
from stemserve.service.errors import (
    STATUS,
    InvalidRequest,
    NeverFits,
    PrefixNotFound,
    QueueFull,
    RequestError,
)
from stemserve.service.serving.status import status_message, unexpected


def test_every_request_error_has_a_status() -> None:
    assert set(RequestError.__subclasses__()) == set(STATUS)


def test_a_field_error_names_the_field() -> None:
    error = status_error(status_message(InvalidRequest("n", "must be at least 1")))
    assert error.violations == {"n": "must be at least 1"}
    assert str(error) == "INVALID_ARGUMENT: n: must be at least 1"


def test_only_a_full_queue_asks_for_a_retry() -> None:
    full = status_error(status_message(QueueFull("full", retry_after_s=0.25)))
    never = status_error(status_message(NeverFits("too large")))
    assert (full.retry_after_s, never.retry_after_s) == (0.25, None)
    assert full.code is never.code


@pytest.mark.parametrize(
    ("error", "reason"),
    [(PrefixNotFound("x"), "PREFIX_NOT_FOUND"), (NeverFits("x"), "NEVER_FITS")],
)
def test_the_reason_is_the_errors_name(error: RequestError, reason: str) -> None:
    assert status_error(status_message(error)).reason == reason


def test_an_unforeseen_error_shows_its_type_only() -> None:
    assert "ZeroDivisionError" in str(unexpected(ZeroDivisionError("secret")))
    assert "secret" not in str(unexpected(ZeroDivisionError("secret")))
