"""The connection of one event loop to the service: its credentials, requests with retries, and the life of sandboxes.

Address and credentials are read only from environment variables. A sandbox has a TTL, the time after which the service
removes it, and a connection renews it. If the response to a creation is lost, this module looks for the sandbox by its
unique name, which the service accepts only once. So no sandbox is created twice or forgotten. The connection closes
when no container needs it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import random
import re
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from ares_exp.backoff import backoff_sec
from ares_exp.cancellation import cancel_all, finish
from ares_exp.containers.container import bounded_start
from ares_exp.containers.daytona import failures
from ares_exp.errors import (
    ContainerDiedError,
    ContainerError,
    ContainerNotFoundError,
    ContainerServiceError,
    ContainerServiceUnavailableError,
    ContainerStartError,
    PreflightError,
)
from ares_exp.records.secrets import protect

if TYPE_CHECKING:
    from daytona import (
        AsyncDaytona,
        AsyncSandbox,
        CreateSandboxFromImageParams,
        CreateSandboxFromSnapshotParams,
    )

DEFAULT_API_URL = "https://app.daytona.io/api"

_API_KEY, _JWT_TOKEN = "DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN"
_ORGANIZATION_ID, _API_URL, _TARGET = "DAYTONA_ORGANIZATION_ID", "DAYTONA_API_URL", "DAYTONA_TARGET"
_PRINTABLE = re.compile(r"[!-\[\]-~]+")  # valid in a header and a URL: no space, line break or backslash


@dataclass(frozen=True, slots=True)
class Credentials:
    """Address and credentials of the service.

    Attributes:
        api_url: Address of the service's API, without a trailing slash.
        api_key: API key of an organisation.
        jwt_token: Token of a user, as an alternative to a key. It requires `organization_id`.
        organization_id: Organisation whose account the sandboxes belong to. Used only with `jwt_token`.
        target: Region of the sandboxes. `None`: the default region of the organisation.
    """

    api_url: str
    api_key: str | None = field(default=None, repr=False)
    jwt_token: str | None = field(default=None, repr=False)
    organization_id: str | None = None
    target: str | None = None

    @classmethod
    def from_environment(cls) -> Credentials:
        """Reads the environment variables that Daytona's SDK documents. Then masks the secrets in all files and logs.

        Raises `PreflightError` if a variable is missing or unusable.
        """
        key, token, organization = _value(_API_KEY), _value(_JWT_TOKEN), _value(_ORGANIZATION_ID)
        protect(secret for secret in (key, token) if secret)
        if not key and not token:
            raise PreflightError(
                f"container=daytona needs credentials, but the environment has none. Set {_API_KEY} to a key from the "
                f"service's dashboard, or set {_JWT_TOKEN} and {_ORGANIZATION_ID}. Optionally set {_API_URL} to use a "
                f"service other than {DEFAULT_API_URL}, and {_TARGET} to choose a region. Files named .env are ignored."
            )
        if not key and not organization:
            raise PreflightError(
                f"{_JWT_TOKEN} is set without {_ORGANIZATION_ID}. Also set {_ORGANIZATION_ID} to the "
                f"organization that owns the sandboxes, or use {_API_KEY} instead of both."
            )
        return cls(
            api_url=_checked_url(_value(_API_URL) or DEFAULT_API_URL),
            api_key=key,
            jwt_token=None if key else token,
            organization_id=None if key else organization,
            target=_value(_TARGET),
        )


def has_credentials() -> bool:
    """Returns whether an environment variable contains a credential. Other required variables may still be missing."""
    return any(os.environ.get(name, "").strip() for name in (_API_KEY, _JWT_TOKEN))


def _value(name: str) -> str | None:
    value = os.environ.get(name, "").strip()
    if value and not _PRINTABLE.fullmatch(value):
        raise PreflightError(
            f"{name} contains a space, a line break or another character that keys and addresses cannot contain."
        )
    return value or None


def _checked_url(text: str) -> str:
    """Returns the API's address without a trailing slash. Raises `PreflightError` if it is malformed or unencrypted."""
    try:
        url = urlsplit(text)
        host, _ = url.hostname, url.port
    except ValueError as error:
        raise PreflightError(
            f"{_API_URL} is not an address: {error}. Set it to an address such as {DEFAULT_API_URL}."
        ) from error
    if url.username is not None or "?" in text or "#" in text:
        raise PreflightError(
            f"{_API_URL} has a user, a query or a fragment. Set it to a plain address such as "
            f"{DEFAULT_API_URL}, and set {_API_KEY} to the key."
        )
    if url.scheme not in ("http", "https") or not host:
        raise PreflightError(f"Expected {_API_URL} to be an address like {DEFAULT_API_URL}, got {text!r}.")
    if url.scheme == "http" and host not in ("localhost", "127.0.0.1", "::1"):
        raise PreflightError(
            f"Expected {_API_URL} to start with https://, got {text}. Over http://, the key would be sent "
            "unencrypted. Use http:// only for a service on this machine."
        )
    return text.rstrip("/")


T = TypeVar("T")

CALL_TIMEOUT_SEC = 60.0
"""Default time limit for one request, including its retries."""

FEW_TRIES = 4
"""Maximum number of attempts if the service responds with status 500, because this error may be permanent."""

_MAX_SEC = 10.0
_LOOK_SEC = 15.0
_SHARE = 3  # renewals per TTL: two consecutive renewals may fail
_RENEW_SEC = 30.0
_ENDED = frozenset({"error", "build_failed", "destroying", "destroyed", "stopping", "stopped", "archiving", "archived"})
_logger = logging.getLogger(__name__)
_rng = random.Random()


class DaytonaService:
    """Sends requests to the service, with retries, and renews TTLs. Each event loop has its own `DaytonaService`.

    Attributes:
        credentials: Address and credentials of the service.
        creating: Asyncio tasks that are creating sandboxes, by the sandbox's name. A task stays here until it is known
            whether the sandbox exists.
        holders: Number of containers and factory calls that use the connection. At 0, it is closed.
        has_object_store: Whether the service accepts files for building images. True until the service rejects a file.
        minute_sec: Length of a minute in seconds. Tests set a smaller value, so that TTLs are renewed sooner.
    """

    def __init__(self, credentials: Credentials, *, base_sec: float = 0.5) -> None:
        """Creates the object without connecting. `base_sec` limits the first wait for a retry; later limits double."""
        self.credentials = credentials
        self.creating: dict[str, asyncio.Task[AsyncSandbox]] = {}
        self.holders = 0
        self.has_object_store = True
        self.minute_sec = 60.0
        self._renewals: dict[str, asyncio.Task[None]] = {}
        self._has_warned = False
        self._client: AsyncDaytona | None = None
        self._is_closed = False
        self._base_sec = base_sec

    @property
    def client(self) -> AsyncDaytona:
        """The SDK's client. It is created on first use, in the running event loop."""
        if self._is_closed:
            raise ContainerServiceError("The connection to the Daytona service has been closed.")
        if self._client is None:
            self._client = _connect(self.credentials)
        return self._client

    async def call(
        self,
        what: str,
        request: Callable[[AsyncDaytona], Awaitable[T]],
        *,
        timeout_sec: float = CALL_TIMEOUT_SEC,
        unreachable_sec: float = math.inf,
        repeatable: bool = True,
    ) -> T:
        """Sends a request, with retries after transient failures.

        Args:
            what: Subject of the error message, for example "The sandbox x".
            request: Function that sends the request once, through the SDK. Called for each attempt.
            timeout_sec: Time limit for all attempts and the waits between them.
            unreachable_sec: Shorter limit that applies as long as no connection can be established, for example because
                the address is wrong.
            repeatable: Whether sending the request twice is harmless. If not, the request is retried only if the
                service has certainly not acted on it: after a rate limit (429), or if no connection was established.

        Raises:
            ContainerServiceError: The last attempt failed. The error's class identifies the cause. If the time limit
                ends an attempt of a repeatable request, the error is the one of the attempt before.
            ContainerDiedError: The sandbox of the request is gone.
        """
        from daytona import DaytonaError

        loop, client = asyncio.get_running_loop(), self.client  # before the time is measured: its imports take long
        started, failure = loop.time(), None
        for tries in itertools.count(1):
            timer = asyncio.timeout_at(started + timeout_sec)
            try:
                async with timer:
                    return await request(client)
            except DaytonaError as error:
                failure = failures.read(what, error)
                wait_sec = self._wait_sec(tries, failure)
                may_pass = failure.passes and not (failure.few_tries and tries >= FEW_TRIES)
                bound_sec = min(timeout_sec, unreachable_sec) if failure.never_connected else timeout_sec
                is_late = loop.time() + wait_sec >= started + bound_sec
                if is_late or not may_pass or not (repeatable or failure.untouched):
                    raise failure.error from None
            except TimeoutError:
                if not timer.expired():
                    raise
                if failure is None or not repeatable:
                    raise failures.unanswered(what, timeout_sec) from None
                raise failure.error from None
            await asyncio.sleep(wait_sec)
        raise AssertionError("unreachable")

    async def is_gone(self, sandbox: AsyncSandbox, *, must_answer: bool = False) -> bool:
        """Returns whether a sandbox is gone or can no longer run.

        Call this after an ambiguous error. For example, the service's proxy reports a wrong key (401) if a sandbox is
        missing. If the service does not respond, this method returns false, or raises the error if `must_answer` is
        true.
        """
        try:
            found = await self.call(
                f"The sandbox {sandbox.name}", lambda client: client.get(sandbox.id), timeout_sec=_LOOK_SEC
            )
        except (ContainerDiedError, ContainerNotFoundError):
            return True
        except ContainerServiceError:
            if must_answer:
                raise
            return False
        return has_ended(found)

    def keep_alive(self, sandbox: AsyncSandbox, ttl_min: int) -> None:
        """Starts to renew the TTL (`ttl_min` minutes) and the inactivity timer of a new sandbox.

        They are renewed when a third of the TTL has passed. If this process dies, the sandbox expires.
        """
        self._renewals[sandbox.id] = asyncio.create_task(self._renew(sandbox, ttl_min))

    def let_expire(self, sandbox: AsyncSandbox) -> None:
        """Stops renewing the TTL of a sandbox. Idempotent."""
        if (task := self._renewals.pop(sandbox.id, None)) is not None:
            task.cancel()

    async def _renew(self, sandbox: AsyncSandbox, ttl_min: int) -> None:
        async def renew(_: AsyncDaytona) -> None:
            await sandbox.set_ttl(ttl_min)
            await sandbox.refresh_activity()

        after_min = ttl_min / _SHARE
        while True:
            await asyncio.sleep(after_min * self.minute_sec)
            after_min = ttl_min / _SHARE
            try:
                await self.call(f"The sandbox {sandbox.name}", renew, timeout_sec=_RENEW_SEC)
            except (ContainerDiedError, ContainerNotFoundError):
                return  # the user of the container gets the error
            except ContainerError as error:
                after_min = min(1.0, after_min)
                level = logging.DEBUG if self._has_warned else logging.WARNING
                self._has_warned = True
                _logger.log(
                    level,
                    "The TTL of a sandbox (the time until its removal) could not be set to %d minutes. %s",
                    ttl_min,
                    error,
                )

    async def close(self) -> None:
        self._is_closed = True
        tasks = [*self._renewals.values(), *self.creating.values()]
        self._renewals.clear()
        self.creating.clear()
        await cancel_all(*tasks)
        client, self._client = self._client, None
        if client is not None:
            await client.close()  # type: ignore[no-untyped-call]

    def _wait_sec(self, tries: int, failure: failures.Failure) -> float:
        if failure.wait_sec is None:
            return backoff_sec(tries, base_sec=self._base_sec, max_sec=_MAX_SEC, rng=_rng)
        # Never retry earlier than requested. The jitter spreads clients that were rejected at the same time.
        return failure.wait_sec + self._base_sec * _rng.uniform(0.0, 1.0)


def state_of(resource: Any) -> str:
    """Returns the last known state of a sandbox or snapshot, in the service's words."""
    return "unknown" if resource.state is None else str(resource.state.value)


def has_ended(sandbox: AsyncSandbox) -> bool:
    """Returns whether the last known state of a sandbox means that it will not run again."""
    return state_of(sandbox) in _ENDED


# The SDK also looks for these in files named .env in the working directory, which may come from an agent. They could
# select a region and send traces of all requests anywhere. Variables, even empty ones, override the files.
_NOT_FROM_FILES = "API_KEY JWT_TOKEN ORGANIZATION_ID TARGET OTEL_ENABLED EXPERIMENTAL_OTEL_ENABLED HAPPY_EYEBALLS_DELAY"
_connecting = threading.Lock()  # every loop has its own service and thread


def _connect(credentials: Credentials) -> AsyncDaytona:
    """Creates the client of Daytona's SDK, without a limit on parallel requests: every sandbox keeps requests open.

    The client polls instead of using the event stream, whose library (`engineio`) lets Ctrl-C stop the event loop.
    """
    from daytona import AsyncDaytona, DaytonaConfig

    config = DaytonaConfig(
        api_key=credentials.api_key,
        jwt_token=credentials.jwt_token,
        organization_id=credentials.organization_id,
        api_url=credentials.api_url,
        target=credentials.target,
        connection_pool_maxsize=None,
        use_deprecated_polling=True,
    )
    with _connecting, warnings.catch_warnings(action="ignore"):  # the SDK warns about polling, addresses in files
        names = [f"DAYTONA_{name}" for name in _NOT_FROM_FILES.split()]
        missing = [name for name in names if name not in os.environ]
        os.environ.update(dict.fromkeys(missing, ""))
        try:
            return AsyncDaytona(config)
        finally:
            for name in missing:
                del os.environ[name]


class Connections:
    """The connections of a factory. Each event loop that has containers has its own connection."""

    def __init__(self) -> None:
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, DaytonaService] = (
            weakref.WeakKeyDictionary()
        )

    def acquire(self) -> DaytonaService:
        """Returns the connection of the running event loop. The caller must `release` it.

        Raises `PreflightError` if the environment has no credentials.
        """
        loop = asyncio.get_running_loop()
        found = self._of_loop.get(loop)
        if found is None:
            found = self._of_loop[loop] = DaytonaService(Credentials.from_environment())
        found.holders += 1
        return found

    async def release(self, service: DaytonaService) -> None:
        """Releases the connection, and closes it if no other container or call uses it."""
        service.holders -= 1
        if service.holders == 0:
            self._of_loop.pop(asyncio.get_running_loop(), None)
            await service.close()


APPEARS_WITHIN_SEC = 5.0
"""Seconds to wait until a sandbox appears, after the response to its creation was lost."""

REMOVAL_SEC = 60.0
"""Time limit for removing a sandbox, with retries during its creation. If it expires, only the TTL removes it."""

_TRIES = 6  # attempts at a creation, while failed attempts leave no sandbox
_PAUSE_SEC = 0.3
_LATE_START_SEC = 60.0


async def create_sandbox(
    service: DaytonaService,
    params: CreateSandboxFromSnapshotParams | CreateSandboxFromImageParams,
    *,
    name: str,
    timeout_sec: float,
) -> AsyncSandbox:
    """Creates a sandbox and waits until it is running. Its TTL (time to live) starts at that moment.

    After an error or cancellation, the sandbox is removed. The removal may take `REMOVAL_SEC` longer than
    `timeout_sec`.

    Raises:
        EnvironmentStartTimeoutError: The creation took longer than `timeout_sec`.
        ContainerStartError: The image cannot be built, or the sandbox does not start.
        ContainerServiceError: The service rejected the request. The error's class identifies the cause.
    """
    params = params.model_copy(update={"name": name})
    loop = asyncio.get_running_loop()
    asked_at = loop.time()
    remedy = "The first start with a large image takes longer. To double the limit, set `timeouts.build_multiplier=2`."
    async with bounded_start(f"The sandbox {name}", timeout_sec, stop=lambda: _undo(service, name), remedy=remedy):
        sandbox = await _create_or_adopt(service, params, name, timeout_sec)
        ttl_min = params.ttl_minutes or 0
        if ttl_min and loop.time() - asked_at > _LATE_START_SEC:  # includes the build of its image
            await service.call(f"The sandbox {name}", lambda _: sandbox.set_ttl(ttl_min))
    if service.creating.pop(name, None) is None:  # its removal was requested in the meantime
        await finish(_delete(service, sandbox))
        raise ContainerDiedError(f"The sandbox {name} was removed while it was being created.")
    return sandbox


async def delete_sandbox(service: DaytonaService, name: str) -> None:
    """Removes a sandbox, even if it is still being created. Does nothing if the sandbox does not exist."""
    loop = asyncio.get_running_loop()
    creation = service.creating.pop(name, None)
    deadline = loop.time() + APPEARS_WITHIN_SEC
    try:
        for tries in itertools.count(1):
            sandbox = await _find(service, name)
            if sandbox is not None:
                await _delete(service, sandbox)
                return
            if creation is None or not _may_appear(creation) or loop.time() > deadline:
                return
            pause = backoff_sec(tries, base_sec=_PAUSE_SEC, max_sec=2.0, rng=_rng)
            await (asyncio.sleep(pause) if creation.done() else asyncio.wait({creation}, timeout=pause))
    finally:
        if creation is not None:
            await cancel_all(creation)


async def _create_or_adopt(
    service: DaytonaService,
    params: CreateSandboxFromSnapshotParams | CreateSandboxFromImageParams,
    name: str,
    timeout_sec: float,
) -> AsyncSandbox:
    """Creates a sandbox, and returns it when it is running. If the response is lost, finds the sandbox by its name.

    The caller must limit the total time, because `timeout_sec` limits only the retries of one request.
    """
    what = f"The sandbox {name}"

    async def create(client: AsyncDaytona) -> AsyncSandbox:
        # A separate task, because the service may still act on an abandoned request. Its response is then needed.
        creation = service.creating[name] = asyncio.ensure_future(client.create(params, timeout=0))
        creation.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieves the exception
        await asyncio.wait({creation})
        if creation.cancelled():
            raise ContainerDiedError(f"The sandbox {name} was removed while it was being created.")
        return creation.result()

    for tries in itertools.count(1):
        try:
            return await service.call(what, create, timeout_sec=timeout_sec, repeatable=False)
        except ContainerError as error:
            sandbox = await _find(service, name)
            if sandbox is not None:
                return await _wait_until_started(service, sandbox)
            is_conflict = isinstance(error, ContainerServiceError) and error.status == 409  # with a deleted sandbox
            if tries == _TRIES or not (is_conflict or isinstance(error, ContainerServiceUnavailableError)):
                raise
            await asyncio.sleep(backoff_sec(tries, base_sec=_PAUSE_SEC, max_sec=10.0, rng=_rng))
    raise AssertionError("unreachable")


async def _wait_until_started(service: DaytonaService, sandbox: AsyncSandbox) -> AsyncSandbox:
    """Waits until an existing sandbox is running, after the response to its creation was lost."""
    what = f"The sandbox {sandbox.name}"
    try:
        if not has_ended(sandbox):
            await service.call(what, lambda _: sandbox.wait_for_sandbox_start(timeout=0), timeout_sec=math.inf)
            return sandbox
    except ContainerServiceError:
        if not has_ended(sandbox):
            raise
    state = state_of(sandbox)
    reason = failures.plain(sandbox.error_reason or "the service gives no reason").rstrip(".")
    problem = "its image could not be built" if state == "build_failed" else f"it is in state {state}"
    raise ContainerStartError(f"{what} did not start, because {problem}: {reason}.")


async def _undo(service: DaytonaService, name: str) -> None:
    """Removes the sandbox after a failed creation. Only logs errors, so that the creation's own error is raised."""
    if name not in service.creating:
        return  # nothing was requested
    try:
        async with asyncio.timeout(REMOVAL_SEC):
            await delete_sandbox(service, name)
    except (ContainerError, TimeoutError) as error:
        reason = str(error) or f"it did not end within {REMOVAL_SEC:g} s"
        _logger.warning("The sandbox %s could not be removed, and may remain until its TTL ends. %s", name, reason)


async def _find(service: DaytonaService, name: str) -> AsyncSandbox | None:
    try:
        return await service.call(f"The sandbox {name}", lambda client: client.get(name), timeout_sec=_LOOK_SEC)
    except (ContainerDiedError, ContainerNotFoundError):
        return None


async def _delete(service: DaytonaService, sandbox: AsyncSandbox) -> None:
    with contextlib.suppress(ContainerDiedError, ContainerNotFoundError):  # another removal was faster
        await service.call(
            f"The sandbox {sandbox.name}", lambda _: sandbox.delete(timeout=_LOOK_SEC), timeout_sec=REMOVAL_SEC
        )


def _may_appear(creation: asyncio.Task[AsyncSandbox]) -> bool:
    if not creation.done() or creation.cancelled():
        return True
    error = creation.exception()
    return error is not None and not failures.was_refused(error)
