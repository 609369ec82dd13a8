"""The connection shared by the containers of a factory, open while one of them needs it."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass

from ares_exp.containers.daytona.credentials import Credentials
from ares_exp.containers.daytona.keepalive import KeepAlive
from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.containers.images.object_store import has_object_store


@dataclass(slots=True)
class Connection:
    """The connection of one event loop.

    Attributes:
        service: Sends requests.
        keep_alive: Keeps sandboxes alive.
        holders: The number of containers that use it.
    """

    service: DaytonaService
    keep_alive: KeepAlive
    holders: int = 0
    _object_store: asyncio.Task[bool] | None = None

    async def has_object_store(self) -> bool:
        """Returns whether the service takes files for its image builder; asks once.

        Raises:
            ContainerServiceError: As `object_store.has_object_store`.
        """
        if self._object_store is None or (self._object_store.done() and self._object_store.exception()):
            self._object_store = asyncio.ensure_future(has_object_store(self.service))
        return await asyncio.shield(self._object_store)

    async def close(self) -> None:
        """Stops the keepalive and closes the connection."""
        if self._object_store is not None:
            self._object_store.cancel()
            await asyncio.wait({self._object_store})
        await self.keep_alive.close()
        await self.service.close()


class Connections:
    """One connection per event loop with containers."""

    def __init__(self) -> None:
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Connection] = weakref.WeakKeyDictionary()

    def acquire(self) -> Connection:
        """Returns the running loop's connection. The caller has to `release` it.

        Raises:
            PreflightError: The credentials in the environment are missing or malformed.
        """
        loop = asyncio.get_running_loop()
        found = self._of_loop.get(loop)
        if found is None:
            service = DaytonaService(Credentials.from_environment())
            found = self._of_loop[loop] = Connection(service, KeepAlive(service))
        found.holders += 1
        return found

    async def release(self, connection: Connection) -> None:
        """Ends one use of the connection; the last one closes it."""
        connection.holders -= 1
        if connection.holders == 0:
            loop = asyncio.get_running_loop()
            if self._of_loop.get(loop) is connection:
                del self._of_loop[loop]
            await connection.close()
