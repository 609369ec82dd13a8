"""A forwarded port that is a listening socket of this process, made inside the container's network."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
from collections.abc import Callable

from ares_exp.cancellation import finish, in_thread
from ares_exp.containers.forwarded_port import CUT_SEC, FORWARDED_PORT_HOST, MAX_CONNECTIONS, PORTS_TRIED, Serve
from ares_exp.errors import PortForwardingError

_SHORT_OF_DESCRIPTORS_SEC = 0.5
_logger = logging.getLogger(__name__)

Listen = Callable[[tuple[str, int]], socket.socket]
"""Opens a socket that listens at an address. Blocking; raises `OSError`."""


def listen_at_free_port(listen: Listen, port: int) -> socket.socket:
    """Listens at `port` of the loopback, or at one of the next. Blocking.

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
    """Opens a forwarded port at the socket that `listen` makes in a thread.

    Raises:
        PortForwardingError, OSError: As `listen`.
    """
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
