"""Forwarded ports: addresses inside a container that lead to a server in this process, under any network policy.

A forwarded port gives access to this server only. `ListeningPort` uses a listening socket that this process creates
inside the container's network. Backends that can only start a shell in the container use `RelayedPort`: the data takes
the stdin and stdout of a program in the container, which is called the relay. An interpreter of the image runs its
source (`relay.py`, `relay.pl` or `relay.mjs`). The agent can tamper with the relay, so this module checks its frames
and bounds the memory for their data.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import shlex
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any, Protocol, TypeVar, runtime_checkable

from ares_exp.cancellation import cancel_all, finish, in_thread
from ares_exp.containers.shell_channel import ChannelStream
from ares_exp.containers.terminal import Terminal
from ares_exp.errors import ContainerDiedError, ContainerError, PortForwardingError

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


OPEN_SEC = 60.0
"""Time limit for starting a relay. The start takes some tenths of a second, or several requests to a service."""

_CLOSE_SEC = 2.0
_WORDS_PER_LEASE = 4
_LINE_BYTES = 500
_WINDOW_BYTES = 256 * 1024
_CHUNK_BYTES = 32 * 1024
_WRITE_BYTES = 256 * 1024
_END, _MORE, _BROKEN, _ACCEPTED = 0, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF
_HEAD = struct.Struct(">II")

OpenShell = Callable[[], Awaitable[ChannelStream]]
"""Function that starts a shell (`sh`) as root of the container. Raises `ContainerError` if that fails."""

# The agent's settings of these programs must not affect the relay. `sh` may read ahead, so wait for each answer.
_FIND = """
exec 2>/dev/null; unset PYTHONHOME PYTHONPATH PERL5LIB PERL5OPT PERL_UNICODE NODE_OPTIONS NODE_PATH; cd /
_new_enough='import select, socket, struct, sys; sys.exit(sys.version_info < (3, 6))'
if python3 -I -S -c "$_new_enough" </dev/null; then echo python3
elif perl -MIO::Socket::INET -MErrno -e 1 </dev/null; then echo perl
elif node --input-type=module -e 0 </dev/null; then echo node
else echo none; fi
"""
_RUN = {
    "python3": ("relay.py", "exec python3 -I -S -c {source} {lease} {ports}"),
    "perl": ("relay.pl", "exec perl -e {source} {lease} {ports}"),
    "node": ("relay.mjs", "exec node --input-type=module -e {source} {lease} {ports}"),
}
_NONE = (
    "No port can be forwarded into the container, because it has neither python3 nor perl nor node. Add one of "
    "them to the image (Debian and Ubuntu: the package perl-base; Alpine: perl){remedy}."
)


class _RelayError(Exception):
    """The relay violated the protocol, or reported its end. The message is a clause."""


class _Relay:
    """A running relay in the container, and its connections."""

    def __init__(self, stream: ChannelStream, port: int, serve: Serve, rest: bytes, lease_sec: int) -> None:
        self.port = port
        self.has_lapsed = False
        self._started_at = time.monotonic()
        self._lease_sec = lease_sec
        self._stream = stream
        self._serve = serve
        self._heard = bytearray(rest)
        self._connections: dict[int, _RelayedConnection] = {}
        self._waiting: deque[bytes] = deque()
        self._has_waiting = asyncio.Event()

    @classmethod
    async def start(
        cls, open_shell: OpenShell, serve: Serve, ports: range, *, lease_sec: int, remedy: str = ""
    ) -> _Relay:
        stream = None
        try:
            async with asyncio.timeout(OPEN_SEC):
                stream = await open_shell()
                await stream.write(_FIND.encode())
                found, _ = await _line(stream)
                if found not in _RUN:
                    raise PortForwardingError(_NONE.format(remedy=remedy))
                name, command = _RUN[found]
                source = resources.files("ares_exp.containers").joinpath(name).read_text()
                words = command.format(source=shlex.quote(source), lease=lease_sec, ports=" ".join(map(str, ports)))
                await stream.write(f"{words}\n".encode())
                said, rest = await _line(stream)
        except BaseException as error:
            if stream is not None:
                stream.close()
            if isinstance(error, OSError):  # a `TimeoutError` is also an `OSError`
                why = str(error) or f"no response within {OPEN_SEC:g} s"
                raise PortForwardingError(f"No relay could be started in the container: {why}.") from error
            raise
        word, _, port = said.partition(" ")
        if word == "port" and port.isdecimal() and int(port) in ports:
            return cls(stream, int(port), serve, rest, lease_sec)
        stream.close()
        if word == "taken":
            raise PortForwardingError(
                f"None of the ports {ports[0]} to {ports[-1]} of the container's loopback address is free, because "
                "programs in the container use them. Set another port with `agent.port`."
            )
        raise PortForwardingError(f"The relay in the container ({found}) is not listening. Its output: {said!r}.")

    async def run(self) -> str:
        """Handles the relay's frames until it ends, then cuts its connections. Returns why it ended, as a clause."""
        own = {asyncio.create_task(self._write()), asyncio.create_task(self._renew())}
        try:
            self._take_in()
            while data := await self._stream.read():
                self._heard += data
                self._take_in()
            return "it ended"
        except OSError as error:
            return f"its connection broke ({error})"
        except _RelayError as error:
            return str(error)
        finally:
            self._stream.close()
            carried = [connection.carried for connection in self._connections.values()]
            await finish(cancel_all(*own, *carried, within_sec=CUT_SEC))

    def put(self, number: int, word: int, data: bytes = b"") -> None:
        """Queues a frame for sending. The queue stays small, because unconfirmed data of each connection is limited."""
        self._waiting.append(_HEAD.pack(number, word) + data)
        self._has_waiting.set()

    async def _renew(self) -> None:
        """Renews the relay's lease with a frame that has no effect, unless other frames are waiting to be sent."""
        while self._lease_sec:
            await asyncio.sleep(self._lease_sec / _WORDS_PER_LEASE)
            if not self._waiting:
                self.put(_ACCEPTED, _MORE)

    async def _write(self) -> None:
        with contextlib.suppress(OSError):  # `run` sees the end of the stream
            while True:
                await self._has_waiting.wait()
                whole = bytearray()
                while self._waiting and len(whole) < _WRITE_BYTES:
                    whole += self._waiting.popleft()
                if not self._waiting:
                    self._has_waiting.clear()
                await self._stream.write(bytes(whole))

    def _take_in(self) -> None:
        """Handles all complete frames that have arrived. Raises `_RelayError` if a frame violates the protocol."""
        heard = self._heard
        while len(heard) >= _HEAD.size:
            number, word = _HEAD.unpack_from(heard)
            end = _HEAD.size + (word if word < _MORE else 0)
            if _CHUNK_BYTES < word < _MORE:
                raise _RelayError(f"it sent a frame of {word} bytes, which is too large")
            if len(heard) < end:
                return
            data = bytes(heard[_HEAD.size : end])
            del heard[:end]
            if number == 0 and word == _END:
                # A lapse of the lease is only credible if the relay has run for at least that long.
                self.has_lapsed = 0 < self._lease_sec <= time.monotonic() - self._started_at
                raise _RelayError(f"it received no message for {self._lease_sec} s")
            if word == _ACCEPTED:
                self._accept(number)
            elif (connection := self._connections.get(number)) is not None:
                if word == _BROKEN:
                    connection.carried.cancel()
                else:
                    connection.hear(word, data)

    def _accept(self, number: int) -> None:
        # Twice as many: a connection that has ended in the container still exists here until the server has its data.
        if number in self._connections or len(self._connections) >= 2 * MAX_CONNECTIONS:
            raise _RelayError(f"it accepted connection {number}, which is open or exceeds the limit")
        connection = self._connections[number] = _RelayedConnection(self, number, self._serve)
        connection.carried.add_done_callback(lambda _: self._connections.pop(number))


class _RelayedConnection:
    """One connection to the forwarded port. Copies its data between the relay and the server's socket."""

    def __init__(self, relay: _Relay, number: int, serve: Serve) -> None:
        self.carried = asyncio.create_task(self._run(serve))
        self._relay = relay
        self._number = number
        self._credit = _WINDOW_BYTES
        self._allowed = _WINDOW_BYTES
        self._has_credit = asyncio.Event()
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()

    def hear(self, word: int, data: bytes) -> None:
        """Handles a frame that has data or confirms sent data. Raises `_RelayError` if the relay sent too much."""
        if word & _MORE:
            self._credit = min(self._credit + (word & ~_MORE), _WINDOW_BYTES)
            self._has_credit.set()
        else:
            self._allowed -= len(data)
            if self._allowed < 0:
                raise _RelayError("it sent more data on a connection than allowed")
            self._arrived.put_nowait(data)

    async def _run(self, serve: Serve) -> None:
        """Passes the connection to `serve`, then copies its data until both directions end or one of them breaks."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        try:
            try:
                await serve(theirs)
            except BaseException as error:
                theirs.close()
                if not isinstance(error, Exception):
                    raise
                _logger.warning("A connection to a forwarded port could not be served: %r", error)
                raise ConnectionError("not served") from error
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._up(ours))
                directions.create_task(self._down(ours))
        except* OSError:
            self._relay.put(self._number, _BROKEN)
        finally:
            ours.close()

    async def _up(self, ours: socket.socket) -> None:
        """Sends the server's data to the relay. Waits while too much of the earlier data is not yet confirmed."""
        loop = asyncio.get_running_loop()
        while True:
            while self._credit == 0:
                self._has_credit.clear()
                await self._has_credit.wait()
            data = await loop.sock_recv(ours, min(_CHUNK_BYTES, self._credit))
            self._credit -= len(data)
            self._relay.put(self._number, len(data), data)
            if not data:
                return

    async def _down(self, ours: socket.socket) -> None:
        loop, taken = asyncio.get_running_loop(), 0
        while True:
            data = await self._arrived.get()
            if not data:
                ours.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(ours, data)
            taken += len(data)
            if taken >= _WINDOW_BYTES // 4:
                self._allowed += taken
                self._relay.put(self._number, _MORE + taken)
                taken = 0


class RelayedPort:
    """A `ForwardedPort` through a relay. If the relay ends, for example because it was killed, it is restarted once.

    A relay that ended because its lease expired is always restarted. This happens if this process or a service is slow.
    """

    def __init__(self, relay: _Relay, start_again: Callable[[], Awaitable[_Relay]]) -> None:
        self.url = f"http://{FORWARDED_PORT_HOST}:{relay.port}"
        self._relay = relay
        self._start_again = start_again
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(), name="relay of a forwarded port")

    async def lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        self._lose("The forwarded port was closed.")
        if not self._running.done():
            self._relay.put(0, _END)  # asks the relay to end
            await finish(asyncio.wait({self._running}, timeout=_CLOSE_SEC))
            await finish(cancel_all(self._running, within_sec=2 * CUT_SEC))

    async def _run(self) -> None:
        has_been_killed = False
        try:
            while True:
                why = await self._relay.run()
                if self._lost.done():
                    return
                if not self._relay.has_lapsed:
                    if has_been_killed:
                        self._lose(f"The relay of the forwarded port ended twice in the container: {why}.")
                        return
                    has_been_killed = True
                _logger.info("The relay of a forwarded port ended and is started again: %s.", why)
                try:
                    self._relay = await self._start_again()
                except ContainerError as error:
                    self._lose(f"The relay of the forwarded port ended ({why}), and could not be restarted: {error}")
                    return
        finally:
            self._lose("The forwarded port is no longer served.")  # after an unexpected error

    def _lose(self, why: str) -> None:
        if not self._lost.done():
            self._lost.set_result(why)


async def open_relayed_port(
    open_shell: OpenShell, serve: Serve, port: int, *, lease_sec: int = 0, remedy: str = ""
) -> RelayedPort:
    """Opens a forwarded port through a relay in the container.

    Args:
        open_shell: Function that starts a shell in the container. The relay replaces this shell.
        serve: Function that serves the connections; see `ServingContainer.forward_port`.
        port: First port to try.
        lease_sec: Seconds after which the relay ends if it receives no frame from this process. Backends whose shells
            outlive this process need a lease. 0: the relay ends only when its stdin is closed.
        remedy: Text for the end of the error message if the image has no interpreter, after the advice to add one.
    """
    start = functools.partial(_Relay.start, open_shell, serve, lease_sec=lease_sec)
    relay = await start(range(port, port + PORTS_TRIED), remedy=remedy)
    return RelayedPort(relay, lambda: start(range(relay.port, relay.port + 1)))


async def _line(stream: ChannelStream) -> tuple[str, bytes]:
    heard = b""
    while b"\n" not in heard:
        data = await stream.read()
        if not data or len(heard) > _LINE_BYTES:
            raise ConnectionError("the shell ended")
        heard += data
    line, _, rest = heard.partition(b"\n")
    return line.decode("utf-8", "replace"), rest
