"""What each error of the SDK becomes, and whether the request is sent again."""

import time
from email.utils import formatdate

import pytest
from daytona import DaytonaConnectionError, DaytonaError, DaytonaTimeoutError
from daytona.common.errors import create_daytona_error

from ares_exp.containers.daytona.failures import plain, read, was_refused
from ares_exp.errors import (
    ContainerAuthorizationError,
    ContainerDiedError,
    ContainerError,
    ContainerNotFoundError,
    ContainerQuotaError,
    ContainerRateLimitError,
    ContainerServiceError,
    ContainerServiceUnavailableError,
)
from ares_exp.records.secrets import protect

API, PROXY, DAEMON = "DAYTONA_API", "DAYTONA_PROXY", "DAYTONA_DAEMON"
NEVER, IF_REPEATABLE, ALWAYS = (False, False), (True, False), (True, True)
QUOTA_TEXT = "Failed to create sandbox: Total CPU limit exceeded. Maximum allowed: 10.\nTo increase"


def said(status: int, message: str = "No", code: str | None = None, source: str | None = None) -> DaytonaError:
    return create_daytona_error(message, status, {}, code, source)


@pytest.mark.parametrize(
    ("error", "kind", "again"),
    [
        (said(400), ContainerServiceError, NEVER),
        (said(401), ContainerAuthorizationError, NEVER),
        (said(403), ContainerAuthorizationError, NEVER),
        (said(403, code="ORGANIZATION_SUSPENDED", source=API), ContainerAuthorizationError, NEVER),
        (said(404), ContainerNotFoundError, NEVER),
        (said(409), ContainerServiceError, NEVER),
        (said(422), ContainerServiceError, NEVER),
        (said(429), ContainerRateLimitError, ALWAYS),
        (said(408, source=DAEMON), ContainerServiceUnavailableError, IF_REPEATABLE),
        *((said(status), ContainerServiceUnavailableError, IF_REPEATABLE) for status in (500, 502, 503, 504, 520)),
        (said(400, code="ORGANIZATION_QUOTA_EXCEEDED", source=API), ContainerQuotaError, NEVER),
        (said(400, QUOTA_TEXT), ContainerQuotaError, NEVER),
        (said(403, QUOTA_TEXT), ContainerQuotaError, NEVER),
        (said(403, "CPU request 64 exceeds maximum allowed per sandbox (4)."), ContainerQuotaError, NEVER),
        (said(400, "Snapshot quota exceeded. Maximum allowed: 3"), ContainerQuotaError, NEVER),
        (said(400, code="NO_AVAILABLE_RUNNERS", source=API), ContainerServiceUnavailableError, ALWAYS),
        (said(409, "Sandbox state change in progress"), ContainerServiceError, ALWAYS),
        (said(404, "Failed to get sandbox: Sandbox with ID or name x not found"), ContainerDiedError, NEVER),
        (said(404, code="SANDBOX_NOT_FOUND", source=PROXY), ContainerDiedError, NEVER),
        (said(404, source=PROXY), ContainerDiedError, NEVER),
        (said(410), ContainerDiedError, NEVER),
        (said(400, code="SANDBOX_NOT_STARTED", source=PROXY), ContainerDiedError, ALWAYS),
        (said(404, "sandbox file not found", "FILE_NOT_FOUND", DAEMON), ContainerNotFoundError, NEVER),
        (said(410, code="SESSION_ENDED", source=DAEMON), ContainerNotFoundError, NEVER),
        (said(404, "Snapshot x not found", source=API), ContainerNotFoundError, NEVER),
        (DaytonaConnectionError("cut"), ContainerServiceUnavailableError, IF_REPEATABLE),
        (DaytonaTimeoutError("late"), ContainerServiceUnavailableError, IF_REPEATABLE),
        (DaytonaError("1 validation error for Sandbox"), ContainerServiceError, NEVER),
    ],
)
def test_sdk_errors_are_classified(error: DaytonaError, kind: type[ContainerError], again: tuple[bool, bool]) -> None:
    failure = read("The sandbox x", error)
    assert type(failure.error) is kind
    assert (failure.passes, failure.untouched) == again
    assert getattr(failure.error, "status", error.status_code) == error.status_code


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After-sandbox-create": "30", "retry-after-authenticated": "4"}, 30.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": formatdate(time.time() - 60)}, 0.0),
        ({"X-RateLimit-Reset": "9"}, None),
    ],
)
def test_retry_after_header_is_read(headers: dict[str, str], seconds: float | None) -> None:
    failure = read("x", create_daytona_error("slow down", 429, headers))
    assert failure.wait_sec == seconds
    assert isinstance(failure.error, ContainerRateLimitError)
    assert failure.error.retry_after_sec == seconds


def test_message_contains_request_response_and_fix() -> None:
    message = str(read("The sandbox x", said(403, "Organization is suspended.", "ORGANIZATION_SUSPENDED", API)).error)
    assert message.startswith(
        "The sandbox x: the Daytona service returned 403, ORGANIZATION_SUSPENDED: Organization is suspended. Check "
    )


def test_response_text_is_masked_and_bounded() -> None:
    protect(["a-secret-in-an-answer"])
    message = str(read("x", said(400, "\x1b[2Ja-secret-in-an-answer\n\n  <html>" + "y" * 100_000)).error)
    assert "\x1b" not in message
    assert "\n" not in message
    assert "*** <html>y" in message
    assert len(message) < 1000
    assert plain(" a\tb\r\n\n c\x00") == "a b c\N{REPLACEMENT CHARACTER}"


def test_only_rejected_requests_had_no_effect() -> None:
    assert was_refused(said(400))
    assert was_refused(said(429))
    assert not any(map(was_refused, (said(408), said(409), said(500), DaytonaConnectionError("cut"), OSError())))
