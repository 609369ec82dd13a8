"""Classification of the errors of Daytona's SDK: what the cause is, and whether the same request may succeed later.

An error may have a code from the service's API, its proxy, or its daemon in the sandbox. Errors without a code are
classified by their text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ares_exp.backoff import retry_after_sec
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
from ares_exp.records.secrets import mask_known_secrets

if TYPE_CHECKING:
    from daytona import DaytonaError

_SHOWN_CHARS = 600

_DAEMON = "DAYTONA_DAEMON"  # in the sandbox

_QUOTA_CODES = frozenset({"ORGANIZATION_QUOTA_EXCEEDED", "SANDBOX_DISK_EXPANSION_LIMIT"})
_QUOTA_TEXT = re.compile(r"\b(limit|quota) exceeded|exceeds maximum allowed", re.IGNORECASE)
_LOST_CODES = frozenset({"SANDBOX_NOT_FOUND", "SANDBOX_NOT_STARTED"})
_LOST_TEXT = re.compile(r"\bsandbox\b.*\bnot found\b", re.IGNORECASE | re.DOTALL)
_CHANGING_TEXT = re.compile(r"state change in progress", re.IGNORECASE)

_REMEDIES: Mapping[type[ContainerError], str] = {
    ContainerQuotaError: (
        "Remove unused sandboxes (`ares-exp clean` removes leftovers of dead runs), start fewer episodes at a time "
        "(concurrency=…), set lower container.cpus, container.memory_mb or container.storage_mb, or ask the service "
        "for a higher limit."
    ),
    ContainerRateLimitError: "Start fewer episodes at a time (concurrency=…).",
    ContainerAuthorizationError: (
        "Check DAYTONA_API_KEY (or DAYTONA_JWT_TOKEN and DAYTONA_ORGANIZATION_ID), the permissions of the key, "
        "and the status of the organisation."
    ),
    ContainerServiceUnavailableError: "Check DAYTONA_API_URL, the network and the state of the service.",
}


class NoObjectStoreError(ContainerServiceError):
    """The service cannot receive files for building an image, because it was deployed without an object store."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed request.

    Attributes:
        error: The error to raise.
        passes: Whether the same request may succeed if it is sent again later.
        untouched: Whether the service has certainly not acted on the request.
        few_tries: Whether the request is retried only a few times, because the failure may be permanent.
        wait_sec: Seconds that the service asks the client to wait; `None` if it does not ask.
        never_connected: Whether the connection could not even be established.
    """

    error: ContainerError
    passes: bool = False
    untouched: bool = False
    few_tries: bool = False
    wait_sec: float | None = None
    never_connected: bool = False


def read(what: str, error: DaytonaError) -> Failure:
    """Classifies an exception of Daytona's SDK. `what` is the subject of the message, such as "The sandbox x"."""
    status, code = error.status_code, error.code
    wait_sec = _wait_sec(error.headers)

    def failure(
        kind: type[ContainerServiceError], *, passes: bool = False, untouched: bool = False, few_tries: bool = False
    ) -> Failure:
        raised = kind(_message(what, error, kind), status=status, retry_after_sec=wait_sec)
        return Failure(raised, passes, untouched, few_tries, wait_sec)

    if _is_lost(error):
        # The service also reports "not started" for a running sandbox that is briefly unreachable.
        is_certain = code != "SANDBOX_NOT_STARTED"
        died = ContainerDiedError(_message(what, error, ContainerDiedError))
        return Failure(died, passes=not is_certain, untouched=not is_certain, few_tries=True)
    if status is None or status < 400:
        if not _is_outage(error):
            return failure(ContainerServiceError)
        never = _never_connected(error)
        return replace(failure(ContainerServiceUnavailableError, passes=True, untouched=never), never_connected=never)
    if code in _QUOTA_CODES or (status in (400, 403) and _QUOTA_TEXT.search(error.message)):
        return failure(ContainerQuotaError)
    if status in (400, 409) and _CHANGING_TEXT.search(error.message):
        return failure(ContainerServiceError, passes=True, untouched=True)
    if has_no_object_store(error):
        return failure(NoObjectStoreError)
    if code == "NO_AVAILABLE_RUNNERS":
        return failure(ContainerServiceUnavailableError, passes=True, untouched=True)
    if status == 429:
        return failure(ContainerRateLimitError, passes=True, untouched=True)
    if status in (401, 403):
        return failure(ContainerAuthorizationError)
    if status in (404, 410):
        return failure(ContainerNotFoundError)
    if status == 408 or status >= 500:
        return failure(ContainerServiceUnavailableError, passes=True, few_tries=status in (500, 501))
    return failure(ContainerServiceError)


def has_no_object_store(error: BaseException) -> bool:
    """Returns whether an image could not be created because the service has no object store for its files."""
    return getattr(error, "status_code", None) == 503 and "object storage is not configured" in str(error).lower()


def unanswered(what: str, seconds: float) -> ContainerServiceUnavailableError:
    """Returns the error to raise for a request that got no response within `seconds`."""
    remedy = _REMEDIES[ContainerServiceUnavailableError]
    return ContainerServiceUnavailableError(
        f"{what}: no response from the Daytona service within {seconds:g} s. {remedy}"
    )


def plain(text: object) -> str:
    """Returns a text of the service as one short line, in which secrets and control characters are replaced."""
    words = " ".join(mask_known_secrets(str(text)).split())
    line = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in words)
    return line if len(line) <= _SHOWN_CHARS else f"{line[: _SHOWN_CHARS - 1]}…"


def _message(what: str, error: DaytonaError, kind: type[ContainerError]) -> str:
    said = plain(error.message).rstrip(".") or "nothing"
    if error.status_code is None:
        answered = f"the Daytona service cannot be reached: {said}" if _is_outage(error) else said
    else:
        code = f", {plain(error.code)}" if error.code else ""
        answered = f"the Daytona service returned {error.status_code}{code}: {said}"
    return f"{what}: {answered}. {_REMEDIES.get(kind, '')}".rstrip()


def _is_lost(error: DaytonaError) -> bool:
    """Returns whether an error means that the sandbox is gone, and not only that a file is missing in it."""
    if error.code in _LOST_CODES:
        return True
    if error.status_code == 410:
        return error.source != _DAEMON
    if error.status_code == 404:
        return error.source == "DAYTONA_PROXY" or (error.source != _DAEMON and bool(_LOST_TEXT.search(error.message)))
    return False


def _is_outage(error: DaytonaError) -> bool:
    """Returns whether an error without an HTTP status is a failed connection or a timeout."""
    from daytona import DaytonaConnectionError, DaytonaTimeoutError

    return isinstance(error, DaytonaConnectionError | DaytonaTimeoutError)


def _never_connected(error: BaseException | None) -> bool:
    from aiohttp import ClientConnectorError

    while error is not None and not isinstance(error, ClientConnectorError):
        error = error.__cause__
    return error is not None


def _wait_sec(headers: Mapping[str, object]) -> float | None:
    """Returns the longest wait in the service's headers `Retry-After-<limit>`, one for each rate limit."""
    asked = [
        retry_after_sec({"retry-after": str(value)})
        for name, value in headers.items()
        if name.lower().startswith("retry-after")
    ]
    return max((seconds for seconds in asked if seconds is not None), default=None)


def was_refused(error: BaseException) -> bool:
    """Returns whether an error means that the service rejected the request and will certainly not act on it later."""
    status = getattr(error, "status_code", None)
    if has_no_object_store(error):
        return True
    return _never_connected(error) if status is None else 400 <= status < 500 and status not in (408, 409)
