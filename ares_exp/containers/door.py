"""Doors: addresses inside a container behind which this process serves connections, whatever network it has.

A door is a way in, not a way out: what connects to it reaches the server that opened it, and nothing else.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, runtime_checkable

from ares_exp.errors import ContainerDiedError

DOOR_HOST = "127.0.0.1"
DOOR_PORT = 61081
"""The port of a door that is tried first."""

PORTS_TRIED = 8
"""Number of ports that are tried, one after the other, when something in the container listens there."""

MAX_CONNECTIONS = 64
"""Simultaneous connections of one door. A further one waits until another has ended."""

CUT_SEC = 5.0
"""Bound on the end of connections that are cut, which takes no time unless `Serve` holds on to them."""

Serve = Callable[[socket.socket], Awaitable[None]]
"""Takes over a connected, non-blocking stream socket, whose other end a process of the container holds; it returns when
the connection is being served, and closes the socket in the end."""


_D = TypeVar("_D", bound="Door")


class Door(Protocol):
    """An open door.

    Attributes:
        url: Its address inside the container, such as `http://127.0.0.1:61081`, without a slash at the end.
    """

    url: str

    async def lost(self) -> str:
        """Waits until the door is broken for good, and returns why, as a sentence."""
        ...

    async def close(self) -> None:
        """Closes it, and cuts what came in by it. Idempotent, never raises for a container that is already gone."""
        ...


@runtime_checkable
class ServingContainer(Protocol):
    """A `Container` that doors can be opened in."""

    async def open_door(self, serve: Serve, *, port: int = DOOR_PORT) -> Door:
        """Makes `serve` reachable at a port of the container's loopback, under any network policy.

        At most `MAX_CONNECTIONS` are open at once. The container's stop, and the end of this process however it ends,
        close the door.

        Args:
            serve: Called with each connection, on the event loop of the caller.
            port: The port that is tried first, then the next ones.

        Raises:
            DoorUnavailableError: It cannot be opened here; with what is lacking.
            ContainerDiedError: The container is gone.
        """
        ...


class OpenDoors:
    """The open doors of one container, which are closed with it."""

    def __init__(self) -> None:
        """There is none yet."""
        self._doors: list[Door] = []
        self._closed = False

    async def add(self, door: _D) -> _D:
        """Takes over a door that has just been opened, and returns it.

        Raises:
            ContainerDiedError: The container was stopped meanwhile; the door is closed.
        """
        if self._closed:
            await door.close()
            raise ContainerDiedError("The container was stopped while a door was being opened in it.")
        self._doors.append(door)
        return door

    async def close(self) -> None:
        """Closes all of them. Idempotent."""
        self._closed = True
        await asyncio.gather(*(door.close() for door in self._doors))
