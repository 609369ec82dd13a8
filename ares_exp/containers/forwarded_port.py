"""Forwarded ports: addresses inside a container behind which this process serves connections, whatever network it has.

A forwarded port is a way in, not a way out: what connects to it reaches the server that opened it, and nothing else.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from ares_exp.cancellation import finish
from ares_exp.containers.terminal import Terminal
from ares_exp.errors import ContainerDiedError

FORWARDED_PORT_HOST = "127.0.0.1"
FORWARDED_PORT = 61081
"""The port of a forwarded port that is tried first."""

PORTS_TRIED = 8
"""Number of ports that are tried, one after the other, when something in the container listens there."""

MAX_CONNECTIONS = 64
"""Simultaneous connections of one forwarded port. A further one waits until another has ended."""

CUT_SEC = 5.0
"""Bound on the end of connections that are cut, which takes no time unless `Serve` holds on to them."""

Serve = Callable[[socket.socket], Awaitable[None]]
"""Takes over a connected, non-blocking stream socket, whose other end a process of the container holds; it returns when
the connection is being served, and closes the socket in the end."""


class ForwardedPort(Protocol):
    """An open forwarded port.

    Attributes:
        url: Its address inside the container, such as `http://127.0.0.1:61081`, without a slash at the end.
    """

    url: str

    async def lost(self) -> str:
        """Waits until the forwarded port is broken for good, and returns why, as a sentence."""
        ...

    async def close(self) -> None:
        """Closes it, and cuts what came in by it. Idempotent, never raises for a container that is already gone."""
        ...


@runtime_checkable
class ServingContainer(Protocol):
    """A `Container` that forwarded ports can be opened in."""

    async def forward_port(self, serve: Serve, *, port: int = FORWARDED_PORT) -> ForwardedPort:
        """Makes `serve` reachable at a port of the container's loopback, under any network policy.

        At most `MAX_CONNECTIONS` are open at once. The container's stop, and the end of this process however it ends,
        close the forwarded port.

        Args:
            serve: Called with each connection, on the event loop of the caller.
            port: The port that is tried first, then the next ones.

        Raises:
            PortForwardingError: It cannot be opened here; with what is lacking.
            ContainerDiedError: The container is gone.
        """
        ...


_O = TypeVar("_O", bound=ForwardedPort | Terminal)
_STOPPED_MEANWHILE = "The container was stopped while a forwarded port was being opened in it."


class ForwardedPorts:
    """The forwarded ports (or terminals) of one container, open or being opened, which end with it."""

    def __init__(self) -> None:
        self._forwarded_ports: list[ForwardedPort | Terminal] = []
        self._openings: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def open(self, opening: Callable[[], Awaitable[_O]]) -> _O:
        """Carries out `opening`, and takes over the forwarded port.

        Raises:
            ContainerDiedError: The container was stopped meanwhile. There is no forwarded port, and nothing of the
                opening is in progress any more when `close` returns.
        """
        if self._closed:
            raise ContainerDiedError(_STOPPED_MEANWHILE)
        task = asyncio.create_task(self._taken(opening), name="opening of a forwarded port")
        self._openings.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:  # cancelled a moment too late
                await finish(task.result().close())
            current = asyncio.current_task()
            if self._closed and not (current is not None and current.cancelling()):
                raise ContainerDiedError(_STOPPED_MEANWHILE) from None
            raise
        finally:
            self._openings.discard(task)

    async def _taken(self, opening: Callable[[], Awaitable[_O]]) -> _O:
        forwarded_port = await opening()
        self._forwarded_ports.append(forwarded_port)
        return forwarded_port

    async def close(self) -> None:
        """Ends the openings, then closes all forwarded ports. Idempotent."""
        self._closed = True
        openings = set(self._openings)
        for task in openings:
            task.cancel()
        if openings:
            await finish(asyncio.wait(openings, timeout=CUT_SEC))
        await asyncio.gather(*(forwarded_port.close() for forwarded_port in self._forwarded_ports))
