"""Forwarded ports: addresses inside a container behind which this process serves connections, whatever network it has.

A forwarded port is a way in, not a way out: what connects to it reaches the server that opened it, and nothing else.
`ListeningPort` is a listening socket of this process, made inside the container's network. `relayed_port` has the
forwarded port for backends that only have a shell.
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

from ares_exp.cancellation import finish, in_thread
from ares_exp.errors import ContainerDiedError, PortForwardingError

if TYPE_CHECKING:
    from ares_exp.containers.terminal import Terminal

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

    async def close(self) -> None:
        """Closes it, and cuts what came in by it. Idempotent, never raises for a container that is already gone."""


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


_O = TypeVar("_O", bound="ForwardedPort | Terminal")
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


_SHORT_OF_DESCRIPTORS_SEC = 0.5
_logger = logging.getLogger(__name__)


def listen_at_free_port(listen: Callable[[tuple[str, int]], socket.socket], port: int) -> socket.socket:
    """Listens at `port` of the loopback, or at one of the next, by `listen`, which raises `OSError`. Blocking.

    Raises:
        PortForwardingError: All of them are taken.
        OSError: As `listen`, for any other reason.
    """
    for candidate in range(port, port + PORTS_TRIED):
        try:
            return listen((FORWARDED_PORT_HOST, candidate))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise PortForwardingError(
        f"Expected a free port among {port} to {port + PORTS_TRIED - 1} of the container's loopback; programs in the "
        "container listen on all of them. Give the agent another one by `agent.port`."
    )


async def open_listening_port(listen: Callable[[], socket.socket], serve: Serve) -> ListeningPort:
    """Opens a forwarded port at the socket that `listen` makes in a thread."""
    made: list[socket.socket] = []
    try:
        await in_thread(lambda: made.append(listen()))
    except BaseException:
        for listener in made:
            listener.close()
        raise
    return ListeningPort(made[0], serve)


class _Connection(socket.socket):
    """A connection that tells when it is closed, whoever closes it."""

    on_close: Callable[[_Connection], None] | None = None

    def close(self) -> None:
        super().close()
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            on_close(self)

    def cut(self) -> None:
        """Ends it in both directions, so that whoever serves it sees its end and closes it."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)


class ListeningPort:
    """A `ForwardedPort`. It lasts as long as this process and the container."""

    def __init__(self, listener: socket.socket, serve: Serve) -> None:
        """Takes over the listener, and starts to accept connections on the running event loop."""
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
        """Waits for `close`: nothing in the container can break the forwarded port."""
        await self._closed.wait()
        return "The forwarded port was closed."

    async def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        tasks: set[asyncio.Future[None]] = {self._accepting, *self._tasks}
        for task in tasks:
            task.cancel()
        await finish(asyncio.wait(tasks, timeout=CUT_SEC))
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
