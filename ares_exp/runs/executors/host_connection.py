"""The connection of a run to a host: messages, answers, and errors on the way."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ares_exp.runs.executors.environment_host import EnvironmentHost


class ConnectionLostError(Exception):
    """The host is gone, for good."""


class ConnectionDoubtfulError(Exception):
    """The host cannot be reached now. The message may have arrived, and may be sent again."""


class HostConnection(Protocol):
    """Carries messages to one host.

    Attributes:
        node: Name of the node that the host is on.
    """

    node: str

    async def send(self, message: bytes) -> bytes:
        """Has the host handle a message, and returns its response.

        Raises:
            ConnectionLostError: The host is gone.
            ConnectionDoubtfulError: It cannot be reached now.
        """
        ...

    async def end(self) -> None:
        """Ends the process of the host, whatever it does. Idempotent."""
        ...


class InProcessConnection(HostConnection):
    """A host in this process: for tests, with everything pickled there and back as between machines."""

    def __init__(self, host: EnvironmentHost, *, node: str = "in-process") -> None:
        """Keeps the host."""
        self.node = node
        self._host = host
        self._handling: set[asyncio.Task[bytes]] = set()
        self._is_lost = asyncio.Event()

    async def send(self, message: bytes) -> bytes:
        """Has the host handle the message in a task of its own, as another process would."""
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
        """Answers no more; the environments are closed, as those of a dead process are gone."""
        self._is_lost.set()
        await self._host.end()
        for handling in self._handling:
            handling.cancel()
