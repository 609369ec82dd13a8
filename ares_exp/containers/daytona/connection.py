"""The connection that the containers of a factory share, and the renewal of the TTLs of their sandboxes.

The connection is open while at least one container needs it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ares_exp.cancellation import cancel_all
from ares_exp.containers.daytona.credentials import Credentials
from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.errors import ContainerDiedError, ContainerError, ContainerNotFoundError

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

_SHARE = 3  # renewals per TTL: two consecutive renewals may fail
_TRY_SEC = 30.0
_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class KeepAlive:
    """Renews the TTL of each sandbox when a third of it has passed. If the runner dies, its sandboxes therefore expire.

    Attributes:
        service: The service of the sandboxes.
        minute_sec: Duration of one minute of a TTL in seconds. Tests shorten it.
    """

    service: DaytonaService
    minute_sec: float = 60.0
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _has_warned: bool = False

    def add(self, sandbox: AsyncSandbox, ttl_min: int) -> None:
        """Starts renewing the TTL (`ttl_min` minutes) and the inactivity timer of a new sandbox."""
        self._tasks[sandbox.id] = asyncio.create_task(self._renew(sandbox, ttl_min))

    def discard(self, sandbox: AsyncSandbox) -> None:
        """Stops renewing the TTL of a sandbox. Idempotent."""
        if (task := self._tasks.pop(sandbox.id, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Stops renewing the TTLs of all sandboxes. Idempotent."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await cancel_all(*tasks)

    async def _renew(self, sandbox: AsyncSandbox, ttl_min: int) -> None:
        async def renew(_: AsyncDaytona) -> None:
            await sandbox.set_ttl(ttl_min)
            await sandbox.refresh_activity()

        after_min = ttl_min / _SHARE
        while True:
            await asyncio.sleep(after_min * self.minute_sec)
            after_min = ttl_min / _SHARE
            try:
                await self.service.call(f"The sandbox {sandbox.name}", renew, timeout_sec=_TRY_SEC)
            except (ContainerDiedError, ContainerNotFoundError):
                return  # the user of the container gets the error
            except ContainerError as error:
                after_min = min(1.0, after_min)
                level = logging.DEBUG if self._has_warned else logging.WARNING
                self._has_warned = True
                _logger.log(
                    level,
                    "The TTL of a sandbox could not be set to %d minutes. %s",
                    ttl_min,
                    error,
                )


@dataclass(slots=True)
class Connection:
    """The connection of one event loop to the service.

    Attributes:
        service: Client of the service.
        keep_alive: Object that renews the TTLs of the sandboxes.
        holders: Number of containers and factory calls that are using the connection.
        has_object_store: Whether the service accepts files for its image builder. True until the service rejects a
            file.
    """

    service: DaytonaService
    keep_alive: KeepAlive
    holders: int = 0
    has_object_store: bool = True


class Connections:
    """The connections of a factory: one connection per event loop that has containers."""

    def __init__(self) -> None:
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Connection] = weakref.WeakKeyDictionary()

    def acquire(self) -> Connection:
        """Returns the running loop's connection, which the caller has to `release`.

        Raises `PreflightError` if the environment has no credentials.
        """
        loop = asyncio.get_running_loop()
        found = self._of_loop.get(loop)
        if found is None:
            service = DaytonaService(Credentials.from_environment())
            found = self._of_loop[loop] = Connection(service, KeepAlive(service))
        found.holders += 1
        return found

    async def release(self, connection: Connection) -> None:
        """Releases the connection, and closes it if no other container or call uses it."""
        connection.holders -= 1
        if connection.holders == 0:
            self._of_loop.pop(asyncio.get_running_loop(), None)
            await connection.keep_alive.close()
            await connection.service.close()
