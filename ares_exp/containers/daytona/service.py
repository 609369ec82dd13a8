"""The connection of one event loop to the service: the SDK's client, and requests with retries."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import threading
import warnings
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ares_exp.backoff import backoff_sec
from ares_exp.cancellation import cancel_all
from ares_exp.containers.daytona import failures
from ares_exp.containers.daytona.credentials import Credentials
from ares_exp.errors import ContainerDiedError, ContainerNotFoundError, ContainerServiceError

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

T = TypeVar("T")

CALL_TIMEOUT_SEC = 60.0
"""Default time limit for one request, including its retries."""

FEW_TRIES = 4
"""Maximum number of attempts if the service responds with status 500, because the error may be permanent."""

_MAX_SEC = 10.0
_LOOK_SEC = 15.0
_ENDED = frozenset({"error", "build_failed", "destroying", "destroyed", "stopping", "stopped", "archiving", "archived"})


class DaytonaService:
    """Sends requests to the service. Each event loop has its own `DaytonaService`.

    Attributes:
        credentials: Address and credentials of the service.
        creating: Tasks that create sandboxes, by the sandbox's name, until it is known whether the sandbox exists.
    """

    def __init__(self, credentials: Credentials, *, base_sec: float = 0.5) -> None:
        """Creates the object without connecting. `base_sec` limits the wait before the first retry, then doubles."""
        self.credentials = credentials
        self.creating: dict[str, asyncio.Task[AsyncSandbox]] = {}
        self._client: AsyncDaytona | None = None
        self._is_closed = False
        self._base_sec = base_sec
        self._rng = random.Random()

    @property
    def client(self) -> AsyncDaytona:
        """The SDK's client, created on first use, in the running loop."""
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
            what: Subject of error messages, for example "The sandbox x".
            request: Function that sends the request once, through the SDK. Called for each attempt.
            timeout_sec: Time limit for all attempts and the waits between them.
            unreachable_sec: Shorter limit that applies as long as no connection can be established, for example because
                the address is wrong.
            repeatable: Whether sending the request twice is harmless. If not, the request is retried only if the
                service has certainly not acted on it: after a rate limit (429), or if no connection was established.

        Raises:
            ContainerServiceError: The last attempt failed. The class identifies the cause.
            ContainerDiedError: The sandbox of the request is gone.
        """
        from daytona import DaytonaError

        loop, client = asyncio.get_running_loop(), self.client  # first: its imports take long
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

        Call it after an ambiguous error: for example, the proxy reports a wrong key (401) for a missing sandbox. If the
        service does not respond, returns false, or raises the error if `must_answer` is true.
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

    async def close(self) -> None:
        self._is_closed = True
        creating = list(self.creating.values())
        self.creating.clear()
        await cancel_all(*creating)
        client, self._client = self._client, None
        if client is not None:
            await client.close()  # type: ignore[no-untyped-call]

    def _wait_sec(self, tries: int, failure: failures.Failure) -> float:
        if failure.wait_sec is None:
            return backoff_sec(tries, base_sec=self._base_sec, max_sec=_MAX_SEC, rng=self._rng)
        # Never retry earlier than requested. The jitter spreads clients that were rejected at the same time.
        return failure.wait_sec + self._base_sec * self._rng.uniform(0.0, 1.0)


def state_of(resource: Any) -> str:
    """Returns the last known state of a sandbox or snapshot, as named by the service."""
    return "unknown" if resource.state is None else str(resource.state.value)


def has_ended(sandbox: AsyncSandbox) -> bool:
    """Returns whether the last known state of a sandbox is final."""
    return state_of(sandbox) in _ENDED


# The SDK also looks for these in files named .env in the working directory, which may come from an agent. They could
# select a region and send traces of all requests anywhere. Variables, even empty ones, override the files.
_NOT_FROM_FILES = "API_KEY JWT_TOKEN ORGANIZATION_ID TARGET OTEL_ENABLED EXPERIMENTAL_OTEL_ENABLED HAPPY_EYEBALLS_DELAY"
_connecting = threading.Lock()  # every loop has its own service and thread


def _connect(credentials: Credentials) -> AsyncDaytona:
    """Creates the client. Parallel requests are unlimited, because every sandbox keeps some requests open.

    The client polls instead of using an event stream, because `engineio` would install a SIGINT handler for Ctrl-C that
    stops the event loop.
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
    with _connecting, warnings.catch_warnings(action="ignore"):  # about the polling, and about addresses in files
        names = [f"DAYTONA_{name}" for name in _NOT_FROM_FILES.split()]
        missing = [name for name in names if name not in os.environ]
        os.environ.update(dict.fromkeys(missing, ""))
        try:
            return AsyncDaytona(config)
        finally:
            for name in missing:
                del os.environ[name]
