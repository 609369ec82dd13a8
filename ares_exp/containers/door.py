"""Doors: addresses inside a container behind which this process serves connections, whatever network it has.

A door is a way in, not a way out: what connects to it reaches the server that opened it, and nothing else.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

DOOR_PORT = 61081
"""The port of a door that is tried first."""

Serve = Callable[[socket.socket], Awaitable[None]]
"""Takes over a connected, non-blocking stream socket, whose other end a process of the container holds; it returns when
the connection is being served, and closes the socket in the end."""


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

        At most 64 connections are open at once. The container's stop, and the end of this process however it ends,
        close the door.

        Args:
            serve: Called with each connection, on the event loop of the caller.
            port: The port that is tried first, then the next ones.

        Raises:
            DoorUnavailableError: It cannot be opened here; with what is lacking.
            ContainerDiedError: The container is gone.
        """
        ...
