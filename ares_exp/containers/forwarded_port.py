"""Forwarded ports: addresses inside a container that lead to a server in this process, under any network policy.

A forwarded port gives access to this server only. `ListeningPort` uses a listening socket that this process creates
inside the container's network. Backends that can only start a shell in the container use `relayed_port`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from ares_exp.cancellation import cancel_all, finish, in_thread
from ares_exp.errors import ContainerDiedError, PortForwardingError

if TYPE_CHECKING:
    from ares_exp.containers.terminal import Terminal

FORWARDED_PORT_HOST = "127.0.0.1"
FORWARDED_PORT = 61081
"""The default port of a forwarded port. If it is taken, the next ports are tried."""

PORTS_TRIED = 8
"""Number of consecutive ports that are tried until one is free, because the container's programs may use some of them.
"""

MAX_CONNECTIONS = 64
"""Maximum number of connections of one forwarded port. A further connection waits until one of them ends."""

CUT_SEC = 5.0
"""Time limit for closing a port's connections. This is normally immediate, but a `Serve` function may delay it."""

Serve = Callable[[socket.socket], Awaitable[None]]
"""Function that serves a connected, non-blocking stream socket. The other end is a program in the container.

The function returns as soon as it has started to serve the connection. The server that it started owns the socket, and
closes it at the end.
"""


class ForwardedPort(Protocol):
    """An open forwarded port. `url` is its address inside the container, such as `http://127.0.0.1:61081`."""

    url: str

    async def lost(self) -> str:
        """Waits until the forwarded port is permanently broken, and returns the reason as a sentence."""

    async def close(self) -> None:
        """Closes the port and cuts its connections. Idempotent, never raises for a container that is already gone."""


@runtime_checkable
class ServingContainer(Protocol):
    """A `Container` with forwarded ports, through which programs in the container reach a server in this process."""

    async def forward_port(self, serve: Serve, *, port: int = FORWARDED_PORT) -> ForwardedPort:
        """Opens a port on the container's loopback, and passes its connections to `serve`, under any network policy.

        At most `MAX_CONNECTIONS` connections are open at the same time. The forwarded port closes when the container
        stops, and when this process ends in any way.

        Args:
            serve: Function that serves a connection. It is called for each new connection, on the caller's event loop.
            port: First port to try. If it is taken, the next ports are tried.

        Raises:
            PortForwardingError: The port cannot be opened in this container. The message names the missing requirement.
            ContainerDiedError: The container is gone.
        """


_O = TypeVar("_O", bound="ForwardedPort | Terminal")
_STOPPED_MEANWHILE = "The container was stopped while a forwarded port was being opened in it."


class ForwardedPorts:
    """The forwarded ports and terminals of one container, so that all of them close when the container stops."""

    def __init__(self) -> None:
        self._forwarded_ports: list[ForwardedPort | Terminal] = []
        self._openings: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def open(self, opening: Callable[[], Awaitable[_O]]) -> _O:
        """Awaits `opening()`, returns the forwarded port or terminal that it opened, and remembers it for `close`.

        Raises `ContainerDiedError` if the container was stopped in the meantime. In this case, nothing stays open.
        """
        if self._closed:
            raise ContainerDiedError(_STOPPED_MEANWHILE)
        task = asyncio.create_task(self._taken(opening), name="opening of a forwarded port")
        self._openings.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if task.done() and not task.cancelled() and task.exception() is None:  # cancelled after the port was opened
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
        """Cancels openings that are still in progress, then closes all forwarded ports and terminals. Idempotent."""
        self._closed = True
        await finish(cancel_all(*self._openings, within_sec=CUT_SEC))
        await asyncio.gather(*(forwarded_port.close() for forwarded_port in self._forwarded_ports))


_SHORT_OF_DESCRIPTORS_SEC = 0.5
_logger = logging.getLogger(__name__)


def listen_at_free_port(listen: Callable[[tuple[str, int]], socket.socket], port: int) -> socket.socket:
    """Calls `listen` with the loopback address and `port`, then with the next ports until a port is free. Blocks.

    Raises `PortForwardingError` if `PORTS_TRIED` ports are taken. Other `OSError`s of `listen` are raised unchanged.
    """
    for candidate in range(port, port + PORTS_TRIED):
        try:
            return listen((FORWARDED_PORT_HOST, candidate))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise PortForwardingError(
        f"None of the ports {port} to {port + PORTS_TRIED - 1} of the container's loopback address is free, because "
        "programs in the container use them. Set another port with `agent.port`."
    )


async def open_listening_port(listen: Callable[[], socket.socket], serve: Serve) -> ListeningPort:
    """Calls `listen` in a thread, and opens a forwarded port on the listening socket that it returns."""
    made: list[socket.socket] = []
    try:
        await in_thread(lambda: made.append(listen()))
    except BaseException:
        for listener in made:
            listener.close()
        raise
    return ListeningPort(made[0], serve)


class _Connection(socket.socket):
    """A connected socket that calls `on_close` whenever it is closed, by the server or by the forwarded port."""

    on_close: Callable[[_Connection], None]

    def close(self) -> None:
        super().close()
        self.on_close(self)


class ListeningPort:
    """A `ForwardedPort` on a listening socket of this process. It lasts as long as this process and the container."""

    def __init__(self, listener: socket.socket, serve: Serve) -> None:
        listener.setblocking(False)
        host, port = listener.getsockname()
        self.url = f"http://{host}:{port}"
        self._listener = listener
        self._serve = serve
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Future[None]] = set()
        self._closed = asyncio.Event()
        self._accepting = asyncio.create_task(self._accept(), name="forwarded_port")

    async def lost(self) -> str:
        """Waits until `close` is called, because nothing in the container can break this forwarded port."""
        await self._closed.wait()
        return "The forwarded port was closed."

    async def close(self) -> None:
        self._closed.set()
        await finish(cancel_all(self._accepting, *self._tasks, within_sec=CUT_SEC))
        self._listener.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # the server reads the end of the stream and closes the connection
                connection.shutdown(socket.SHUT_RDWR)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                self._slots.release()
                _logger.debug("A forwarded port could not accept a connection: %r", error)
                await asyncio.sleep(_SHORT_OF_DESCRIPTORS_SEC)
                continue
            connection = _Connection(fileno=accepted.detach())
            connection.setblocking(False)
            connection.on_close = self._ended
            self._connections.add(connection)
            task = asyncio.ensure_future(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(functools.partial(self._handed_over, connection))

    def _handed_over(self, connection: _Connection, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            connection.close()
        elif (error := task.exception()) is not None:
            connection.close()
            _logger.warning("A connection to a forwarded port could not be served: %r", error)

    def _ended(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._slots.release()
