"""The connection of a run to a host: messages, replies and connection errors."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ares_exp.runs.executors.environment_host import EnvironmentHost


class ConnectionLostError(Exception):
    """The host is permanently lost."""


class ConnectionDoubtfulError(Exception):
    """The host cannot currently be reached. The message may have arrived, and can be sent again."""


class HostConnection(Protocol):
    """Sends messages to one host.

    Attributes:
        node: Name of the host's node.
    """

    node: str

    async def send(self, message: bytes) -> bytes:
        """Sends a message to the host, and returns the reply.

        Raises:
            ConnectionLostError: The host is permanently lost.
            ConnectionDoubtfulError: The host cannot currently be reached.
        """
        ...

    async def end(self) -> None:
        """Kills the process of the host. Idempotent."""
        ...


class InProcessConnection(HostConnection):
    """A connection to a host in this process, for tests. All messages are pickled, as between machines."""

    def __init__(self, host: EnvironmentHost, *, node: str = "in-process") -> None:
        """Stores the host."""
        self.node = node
        self._host = host
        self._handling: set[asyncio.Task[bytes]] = set()
        self._is_lost = asyncio.Event()

    async def send(self, message: bytes) -> bytes:
        """Handles the message in a separate task, like another process."""
        handling = asyncio.ensure_future(self._host.handle(message))
        self._handling.add(handling)
        handling.add_done_callback(self._handling.discard)
        lost = asyncio.ensure_future(self._is_lost.wait())
        try:
            await asyncio.wait({handling, lost}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()
        if self._is_lost.is_set():
            raise ConnectionLostError("it was killed")
        return handling.result()

    async def end(self) -> None:
        """Stops responding and closes the host's environments, as if its process had died."""
        self._is_lost.set()
        await self._host.end()
        for handling in self._handling:
            handling.cancel()
