"""Forwarded ports: addresses inside a container whose connections this process serves, under any network policy.

A forwarded port gives access only to one server in this process. `ListeningPort` uses a listening socket of this
process that is created inside the container's network. Backends that can only start a shell in the container use
`relayed_port`.
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
"""The first port that is tried."""

PORTS_TRIED = 8
"""Number of consecutive ports that are tried, because other programs in the container may listen on some ports."""

MAX_CONNECTIONS = 64
"""Maximum number of connections of one forwarded port. A further connection waits until one of them ends."""

CUT_SEC = 5.0
"""Time limit for closing the connections of a port. They close immediately, unless a `Serve` function delays this."""

Serve = Callable[[socket.socket], Awaitable[None]]
"""Function that takes over a connected, non-blocking stream socket. The other end is in a process of the container.

The function returns as soon as it has started to serve the connection. The server closes the socket at the end.
"""


class ForwardedPort(Protocol):
    """An open forwarded port.

    Attributes:
        url: Address inside the container, such as `http://127.0.0.1:61081`, without a trailing slash.
    """

    url: str

    async def lost(self) -> str:
        """Waits until the forwarded port is permanently broken, and returns the reason as a sentence."""

    async def close(self) -> None:
        """Closes the port and cuts its connections. Idempotent, never raises for a container that is already gone."""


@runtime_checkable
class ServingContainer(Protocol):
    """A `Container` that supports forwarded ports."""

    async def forward_port(self, serve: Serve, *, port: int = FORWARDED_PORT) -> ForwardedPort:
        """Makes `serve` reachable at a port of the container's loopback, under any network policy.

        At most `MAX_CONNECTIONS` connections are open at the same time. The forwarded port closes when the container
        stops, and when this process ends in any way.

        Args:
            serve: Called with each connection, on the event loop of the caller.
            port: First port to try. If it is taken, the next ports are tried.

        Raises:
            PortForwardingError: The port cannot be opened in this container. The message names the missing requirement.
            ContainerDiedError: The container is gone.
        """


_O = TypeVar("_O", bound="ForwardedPort | Terminal")
_STOPPED_MEANWHILE = "The container was stopped while a forwarded port was being opened in it."


class ForwardedPorts:
    """The forwarded ports (or terminals) of one container, open or being opened. They close with the container."""

    def __init__(self) -> None:
        self._forwarded_ports: list[ForwardedPort | Terminal] = []
        self._openings: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def open(self, opening: Callable[[], Awaitable[_O]]) -> _O:
        """Awaits `opening`, and returns the opened forwarded port or terminal. `close` will close it.

        Raises `ContainerDiedError` if the container was stopped during the opening. No forwarded port remains.
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
        """Cancels the openings, then closes all forwarded ports. Idempotent."""
        self._closed = True
        await finish(cancel_all(*self._openings, within_sec=CUT_SEC))
        await asyncio.gather(*(forwarded_port.close() for forwarded_port in self._forwarded_ports))


_SHORT_OF_DESCRIPTORS_SEC = 0.5
_logger = logging.getLogger(__name__)


def listen_at_free_port(listen: Callable[[tuple[str, int]], socket.socket], port: int) -> socket.socket:
    """Calls `listen` for `port` of the loopback, and for the next ports until a port is free. Blocking.

    Raises `PortForwardingError` if all of these ports are taken, and passes on other `OSError`s of `listen`.
    """
    for candidate in range(port, port + PORTS_TRIED):
        try:
            return listen((FORWARDED_PORT_HOST, candidate))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise PortForwardingError(
        f"None of the ports {port} to {port + PORTS_TRIED - 1} of the container's loopback is free, because "
        "programs in the container use them. Set another port with `agent.port`."
    )


async def open_listening_port(listen: Callable[[], socket.socket], serve: Serve) -> ListeningPort:
    """Opens a forwarded port at the socket that `listen` creates in a thread."""
    made: list[socket.socket] = []
    try:
        await in_thread(lambda: made.append(listen()))
    except BaseException:
        for listener in made:
            listener.close()
        raise
    return ListeningPort(made[0], serve)


class _Connection(socket.socket):
    """A connection that calls `on_close` when it is closed, whichever component closes it."""

    on_close: Callable[[_Connection], None] | None = None

    def close(self) -> None:
        super().close()
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            on_close(self)

    def cut(self) -> None:
        """Shuts down both directions of the connection, so that its server sees the end and closes it."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class ListeningPort:
    """A `ForwardedPort` that lasts as long as this process and the container."""

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
        """Waits for `close`, because no program in the container can break the forwarded port."""
        await self._closed.wait()
        return "The forwarded port was closed."

    async def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        await finish(cancel_all(self._accepting, *self._tasks, within_sec=CUT_SEC))
        self._listener.close()
        for connection in list(self._connections):
            connection.cut()

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
        self._connections.discard(connection)
        self._slots.release()
