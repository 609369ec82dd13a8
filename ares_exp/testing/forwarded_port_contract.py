"""Conformance suite for `ServingContainer`, a container with forwarded ports. The containers need bash and `perl`.

To test a backend, inherit from `ForwardedPortContract`. If a process in the container relays the connections to the
host, inherit from `RelayedForwardedPortContract` instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from ares_exp.containers.container import Container, ContainerFactory, ContainerSpec
from ares_exp.containers.forwarded_port import (
    FORWARDED_PORT,
    MAX_CONNECTIONS,
    ForwardedPort,
    Serve,
    ServingContainer,
)
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkMode, NetworkPolicy
from ares_exp.errors import ContainerDiedError, ContainerError
from ares_exp.testing.container_contract import ContainerSuite

SLACK_SEC = 60.0
"""Time limit in seconds for operations that should end soon. It is long, because the machine may be busy."""

CONNECT = "my $s = IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $ARGV[0]) or die qq($!\\n); "
_PUT = (
    "sub put { my ($h, $b) = @_; while (length $b) { my $w = syswrite($h, $b) or die $!; substr($b, 0, $w) = ''; } } "
)
COPY = (
    f"{_PUT}{CONNECT}my $child = fork; "
    "if (!$child) { while (sysread(STDIN, my $b, 65536)) { put($s, $b) } shutdown($s, 1); exit; } "
    "while (sysread($s, my $b, 65536)) { put(*STDOUT, $b) } waitpid($child, 0);"
)
"""Perl program: sends its stdin to the server, and prints the received data until the server closes the connection."""

CONNECT_MANY = f"my @all; {{ {CONNECT} push @all, $s; redo if @all < {MAX_CONNECTIONS}; }} "
_MANY = f"{CONNECT_MANY}syswrite($all[$_], qq($_\n)) for 0..$#all; print scalar readline($_) for @all;"
"""Perl program: opens the maximum number of connections, sends a number over each, and prints the responses."""

_HOLD = f"{CONNECT_MANY}select(undef, undef, undef, 0.05) until -e '/tmp/enough'; print qq(held\n);"
"""Perl program: keeps the maximum number of connections open until the file `/tmp/enough` exists."""

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """Serves each connection with `handler`, and counts connections (`served`)."""

    def __init__(self, handler: Handler) -> None:
        self.served = 0
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def __call__(self, connection: socket.socket) -> None:
        """Serves one connection; see the type `Serve`."""
        self.served += 1
        self._changed.set()
        reader, writer = await asyncio.open_connection(sock=connection)
        self._tasks.add(asyncio.create_task(self._handle(reader, writer)))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            await self._handler(reader, writer)

    async def has_served(self, count: int) -> None:
        """Waits until the server has accepted at least `count` connections."""
        async with asyncio.timeout(SLACK_SEC):
            while self.served < count:
                self._changed.clear()
                await self._changed.wait()

    async def ended(self) -> None:
        """Waits until all connections have ended."""
        async with asyncio.timeout(SLACK_SEC):
            while pending := {task for task in self._tasks if not task.done()}:
                await asyncio.wait(pending)

    async def close(self) -> None:
        """Ends all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Sends all received data back to the client, until the client stops sending."""
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def perl(source: str, port: int) -> str:
    """Returns a shell command that runs a Perl program with the port as argument."""
    return f"perl -MIO::Socket::INET -e {shlex.quote(source)} {port}"


def greet(port: int) -> str:
    """Returns a shell command that sends a line to the port and prints the first received line."""
    return f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo hello >&3 && head -n1 <&3"


def greet_at_last(port: int) -> str:
    """Returns a shell command that repeats `greet` until it receives a line."""
    return f'until said=$(exec 2>/dev/null; {greet(port)}) && [ "$said" ]; do sleep 0.05; done; echo "$said"'


def port_of(forwarded_port: ForwardedPort) -> int:
    """Returns the port number in the URL of a forwarded port."""
    host, _, port = forwarded_port.url.rpartition(":")
    assert host == "http://127.0.0.1"
    return int(port)


class ForwardedPortContract(ContainerSuite):
    """The suite for forwarded ports. Override `factory`, and `spec` if a container needs more than a name."""

    large_bytes = 4 * 2**20
    """Number of bytes for tests with much data. It is larger than the buffers of a connection."""

    own_network = True
    """Whether each container has its own loopback interface. If not, a requested port may already be in use."""

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("forwarded_ports", network=NO_NETWORK)

    @contextlib.asynccontextmanager
    async def opened(self, box: Container, handler: Handler = echo) -> AsyncIterator[tuple[int, Server]]:
        """Opens a forwarded port to a `Server` with `handler`. Yields both, and closes them at the end."""
        server = Server(handler)
        forwarded_port = await self.open(box, server)
        try:
            yield port_of(forwarded_port), server
        finally:
            await forwarded_port.close()
            await server.close()

    async def open(self, box: Container, serve: Serve, port: int = FORWARDED_PORT) -> ForwardedPort:
        """Opens a forwarded port. Its connections are passed to `serve`."""
        assert isinstance(box, ServingContainer)
        return await box.forward_port(serve, port=port)

    async def run(self, box: Container, command: str) -> str:
        """Runs a command and returns its output. Fails if the exit code is not 0."""
        result = await box.exec(command, timeout_sec=SLACK_SEC)
        assert result.exit_code == 0, result.output
        return result.output

    async def refused(self, box: Container, port: int) -> bool:
        """Returns whether connections to a port in the container are refused, because no process listens there."""
        result = await box.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}", timeout_sec=SLACK_SEC)
        return "Connection refused" in result.output

    @pytest.mark.parametrize("start", ["no-network", "public", "allowlist"])
    async def test_port_is_open_under_every_network(
        self, factory: ContainerFactory, spec: ContainerSpec, start: NetworkMode
    ) -> None:
        allowlist = NetworkPolicy("allowlist", frozenset({"192.0.2.1"}))
        policies = {"no-network": NO_NETWORK, "public": PUBLIC, "allowlist": allowlist}
        if (asked := self.with_networks(factory, spec, policies, start)) is None:
            return
        async with factory(asked) as box, self.opened(box) as (port, _):
            for mode in (start, *policies):
                await box.set_network(policies[mode])
                assert await self.run(box, greet(port)) == "hello\n"

    async def test_megabytes_pass_each_way(self, box: Container) -> None:
        async with self.opened(box) as (port, _):
            made = f"head -c {self.large_bytes} /dev/urandom >/tmp/in"
            seen = await self.run(
                box, f"{made}; {perl(COPY, port)} </tmp/in >/tmp/out; md5sum </tmp/in; md5sum </tmp/out"
            )
        first, second = seen.splitlines()
        assert first == second

    async def test_many_connections_are_served_concurrently(self, box: Container) -> None:
        together = asyncio.Event()

        async def together_or_never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if server.served == MAX_CONNECTIONS:
                together.set()
            await together.wait()
            await echo(reader, writer)

        async with self.opened(box, together_or_never) as (port, server):
            result = await box.exec(perl(_MANY, port), timeout_sec=SLACK_SEC)
            assert result.output == "".join(f"{n}\n" for n in range(MAX_CONNECTIONS))
            assert server.served == MAX_CONNECTIONS
            assert await self.run(box, greet_at_last(port)) == "hello\n"  # closed connections do not count

    async def test_excess_connection_waits_or_is_refused(self, box: Container) -> None:
        async with self.opened(box) as (port, server):
            holding = asyncio.create_task(box.exec(perl(_HOLD, port), timeout_sec=SLACK_SEC))
            await server.has_served(MAX_CONNECTIONS)
            result = await box.exec(f"timeout 1 bash -c {shlex.quote(greet(port))}", timeout_sec=SLACK_SEC)
            assert "hello" not in result.output
            assert server.served == MAX_CONNECTIONS
            await self.run(box, "touch /tmp/enough")
            assert (await holding).output == "held\n"
            assert await self.run(box, greet_at_last(port)) == "hello\n"

    async def test_each_direction_can_be_closed(self, box: Container) -> None:
        async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"before\n")
            writer.write(f"{len(await reader.read())}\n".encode())  # after the client's end of file

        async with self.opened(box, count) as (port, _):
            assert await self.run(box, f"head -c 100000 /dev/zero | {perl(COPY, port)}") == "before\n100000\n"
        heard = asyncio.get_running_loop().create_future()

        async def listen_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"all")
            writer.write_eof()
            heard.set_result(await reader.read())

        async with self.opened(box, listen_on) as (port, _):
            after = f"{_PUT}{CONNECT}local $/; my $all = <$s>; put($s, qq($all and more)); close $s;"
            await self.run(box, perl(after, port))
            async with asyncio.timeout(SLACK_SEC):
                assert await heard == b"all and more"

    async def test_reset_by_either_side_closes_both(self, box: Container) -> None:
        async with self.opened(box) as (port, server):
            reset = f"{CONNECT}$s->sockopt(SO_LINGER, pack('II', 1, 0)); syswrite($s, 'x'); sysread($s, my $b, 1);"
            await self.run(box, perl(reset, port))
            await server.ended()
            assert await self.run(box, greet(port)) == "hello\n"

        async def abort(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.transport.abort()

        async with self.opened(box, abort) as (port, _):
            ended = f"{CONNECT}syswrite($s, 'x'); my $n = sysread($s, my $b, 1); print $n ? 'data' : 'end';"
            assert await self.run(box, perl(ended, port)) == "end"

    async def test_stalled_connection_does_not_block_others(self, box: Container) -> None:
        go_on = asyncio.Event()
        received = asyncio.get_running_loop().create_future()

        async def flood_or_echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            kind = await reader.readline()
            if kind == b"flood me\n":
                for _ in range(self.large_bytes // 65536):
                    writer.write(b"x" * 65536)
                    await writer.drain()
            elif kind == b"read later\n":
                await go_on.wait()
                received.set_result(len(await reader.read()))
            else:
                writer.write(kind)

        async with self.opened(box, flood_or_echo) as (port, server):
            idle = f"{CONNECT}syswrite($s, qq(flood me\\n)); select(undef, undef, undef, 0.05) until -e '/tmp/go'; "
            idle += "my $n = 0; while (my $r = sysread($s, my $b, 65536)) { $n += $r } print $n;"
            slow = asyncio.create_task(box.exec(perl(idle, port), timeout_sec=SLACK_SEC))
            fill = f"{_PUT}{CONNECT}put($s, qq(read later\\n)); put($s, 'y' x {self.large_bytes}); shutdown($s, 1);"
            full = asyncio.create_task(box.exec(perl(fill, port), timeout_sec=SLACK_SEC))
            await server.has_served(2)
            for _ in range(3):
                assert await self.run(box, greet(port)) == "hello\n"
            await self.run(box, "touch /tmp/go")
            go_on.set()
            assert (await slow).output == str(self.large_bytes)
            assert (await full).exit_code == 0
            async with asyncio.timeout(SLACK_SEC):
                assert await received == self.large_bytes

    async def test_failing_server_closes_the_connection(self, box: Container) -> None:
        async def serve(connection: socket.socket) -> None:
            raise RuntimeError("not this one")

        forwarded_port = await self.open(box, serve)
        try:
            ended = f"{CONNECT}print sysread($s, my $b, 1) ? 'data' : 'end';"
            for _ in range(2):
                assert await self.run(box, perl(ended, port_of(forwarded_port))) == "end"
        finally:
            await forwarded_port.close()

    async def test_closed_forwarded_port_is_unreachable(self, box: Container) -> None:
        server = Server(echo)
        forwarded_port = await self.open(box, server)
        port = port_of(forwarded_port)
        waiting = asyncio.create_task(box.exec(perl(f"{CONNECT}print sysread($s, my $b, 9);", port), timeout_sec=60))
        async with asyncio.timeout(SLACK_SEC):
            await server.has_served(1)
            await forwarded_port.close()
            assert (await waiting).output in ("0", "")  # end of file, or a reset
            await server.ended()
            await forwarded_port.lost()
        await forwarded_port.close()
        assert await self.refused(box, port)

    async def test_command_time_limit_does_not_affect_port(self, box: Container) -> None:
        async with self.opened(box) as (port, _):
            result = await box.exec(f"{perl(f'{CONNECT}sleep 60;', port)} & sleep 60", timeout_sec=0.5)
            assert result.timed_out
            assert await self.run(box, greet(port)) == "hello\n"

    async def test_occupied_port_is_avoided(self, box: Container) -> None:
        async with self.opened(box) as (first, _), self.opened(box) as (second, _):
            assert first != second
            assert not self.own_network or (first, second) == (FORWARDED_PORT, FORWARDED_PORT + 1)
            assert await self.run(box, f"{greet(first)}; {greet(second)}") == "hello\nhello\n"

    async def test_cancelled_opening_releases_the_port(self, box: Container) -> None:
        for pause in (0.0, 0.001, 0.01, 0.05):
            opening = asyncio.create_task(self.open(box, Server(echo)))
            await asyncio.sleep(pause)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await opening).close()
        async with self.opened(box) as (port, _):
            assert await self.run(box, greet(port)) == "hello\n"

    async def test_stop_during_opening_does_not_hang(self, factory: ContainerFactory, spec: ContainerSpec) -> None:
        for pause in (0.0, 0.001):
            async with factory(spec) as box:
                opening = asyncio.create_task(self.open(box, Server(echo)))
                await asyncio.sleep(pause)
                await box.stop()
                async with asyncio.timeout(SLACK_SEC):
                    with contextlib.suppress(ContainerError):
                        await (await opening).lost()

    async def test_stopped_container_has_no_forwarded_ports(
        self, factory: ContainerFactory, spec: ContainerSpec
    ) -> None:
        box = factory(spec)
        server = Server(echo)
        with pytest.raises(ContainerDiedError):
            await self.open(box, server)
        await box.start()
        forwarded_port = await self.open(box, server)
        waiting = asyncio.create_task(
            box.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port_of(forwarded_port)}; cat <&3; sleep 60")
        )
        async with asyncio.timeout(SLACK_SEC):
            await server.has_served(1)
            await box.stop()
            await server.ended()
            await forwarded_port.lost()
            with pytest.raises(ContainerDiedError):
                await waiting
        with pytest.raises(ContainerDiedError):
            await self.open(box, server)


RELAYS = "grep -l '[T]he relay in' /proc/[0-9]*/cmdline 2>/dev/null | cut -d/ -f3"
"""A shell command that prints the ids of the relay processes in a container."""


class RelayedForwardedPortContract(ForwardedPortContract):
    """The suite for backends in which a process in the container, the relay, passes on connections to the host."""

    async def test_killed_relay_is_restarted_once(self, box: Container) -> None:
        server = Server(echo)
        forwarded_port = await self.open(box, server)
        try:
            port = port_of(forwarded_port)
            cut = f"{perl(f'{CONNECT}print sysread($s, my $b, 9) ? 1 : 0;', port)} & "
            waiting = asyncio.create_task(box.exec(f"{cut} wait", timeout_sec=SLACK_SEC))
            await server.has_served(1)
            await self.run(box, f"kill -9 $({RELAYS})")
            assert (await waiting).output == "0"
            assert await self.run(box, greet_at_last(port)) == "hello\n"
            await self.run(box, f"kill -9 $({RELAYS})")
            async with asyncio.timeout(SLACK_SEC):
                assert "ended twice" in await forwarded_port.lost()
                await server.ended()
            assert await self.refused(box, port)
        finally:
            await forwarded_port.close()

    async def test_closed_port_leaves_no_relay(self, box: Container) -> None:
        async with self.opened(box) as (port, _):
            assert await self.run(box, f"{greet(port)}; {RELAYS} | wc -l") == "hello\n1\n"
        left = f'until [ -z "$({RELAYS})" ]; do sleep 0.05; done; echo none'
        assert await self.run(box, left) == "none\n"
