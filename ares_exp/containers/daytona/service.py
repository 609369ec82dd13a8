"""The connection of one event loop to the service: the SDK's client, requests with retries, and the renewal of TTLs.

A TTL is the time after which the service removes a sandbox. The connection closes when no container needs it any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import random
import threading
import warnings
import weakref
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ares_exp.backoff import backoff_sec
from ares_exp.cancellation import cancel_all
from ares_exp.containers.daytona import failures
from ares_exp.containers.daytona.credentials import Credentials
from ares_exp.errors import ContainerDiedError, ContainerError, ContainerNotFoundError, ContainerServiceError

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

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
        self._rng = random.Random()

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
            ContainerServiceError: The last attempt failed. The error's class identifies the cause.
            ContainerDiedError: The sandbox of the request is gone.
        """
        from daytona import DaytonaError

        loop, client = asyncio.get_running_loop(), self.client  # before the time is measured: its imports take long
        started = loop.time()
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
                raise failures.unanswered(what, timeout_sec) from None
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
            return backoff_sec(tries, base_sec=self._base_sec, max_sec=_MAX_SEC, rng=self._rng)
        # Never retry earlier than requested. The jitter spreads clients that were rejected at the same time.
        return failure.wait_sec + self._base_sec * self._rng.uniform(0.0, 1.0)


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
