"""The time that a forwarded port adds to a request and its response, beside the same over this machine's loopback.

Run by hand: `python -m tests.benchmarks.bench_forwarded_port [local] [relay] [docker] [remote] [daytona]`, by default
all but the last. Client and server send and receive the same in all of them; the ways take turns in blocks, so that a
noisy machine is noisy for all of them. The client is a program in the container, in Perl, and takes the time itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import statistics
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.forwarded_port import FORWARDED_PORT, Serve
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.container import LocalContainer
from ares_exp.containers.network_policy import NO_NETWORK
from ares_exp.containers.relayed_port import open_relayed_port
from ares_exp.testing.forwarded_port_contract import Server, perl, port_of

SIZES = (3_000, 80_000)
RESPONSE_BYTES = 3_000
ROUNDS, BLOCK = 6, 50
SLOW_BLOCK = 8

_ASK = """
sub now { my $t = pack("qq", 0, 0); syscall(CLOCK, 1, $t); my ($s, $n) = unpack("qq", $t); return $s * 1000 + $n / 1e6 }
my ($port, $size, $count) = @ARGV;
my $s = IO::Socket::INET->new(PeerAddr => "127.0.0.1", PeerPort => $port) or die $!;
setsockopt($s, 6, 1, 1);
for (1..$count) {
    my $started = now();
    my $b = pack("N", $size) . ("x" x $size);
    while (length $b) { my $w = syswrite($s, $b) or die $!; substr($b, 0, $w) = "" }
    my $left = ANSWER;
    while ($left) { my $r = sysread($s, my $d, $left) or die "the end"; $left -= $r }
    printf "%.4f\\n", now() - $started;
}
""".replace("ANSWER", str(RESPONSE_BYTES)).replace("CLOCK", "228" if platform.machine() == "x86_64" else "113")

Ask = Callable[[int, int], Awaitable[list[float]]]
"""Asks so many times with requests of so many bytes; returns the milliseconds of each."""


async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers requests: a length, and so many bytes."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
            writer.write(b"y" * RESPONSE_BYTES)


def asking(box: Container, port: int) -> Ask:
    """Asks from inside a container."""

    async def ask(size: int, count: int) -> list[float]:
        result = await box.exec(f"{perl(_ASK, port)} {size} {count}", timeout_sec=300)
        assert result.exit_code == 0, result.output
        return [float(line) for line in result.output.split()]

    return ask


@contextlib.asynccontextmanager
async def plain() -> AsyncIterator[Ask]:
    """The same client and server on this machine's loopback, without a container."""
    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def ask(size: int, count: int) -> list[float]:
        command = f"{perl(_ASK, port)} {size} {count}"
        client = await asyncio.create_subprocess_exec("bash", "-c", command, stdout=asyncio.subprocess.PIPE)
        output, _ = await client.communicate()
        return [float(line) for line in output.split()]

    async with server:
        yield ask


@contextlib.asynccontextmanager
async def forwarded_port(box: Container, relayed: bool = False) -> AsyncIterator[Ask]:
    """By a forwarded port."""
    serve: Serve = Server(respond)
    async with box:
        if relayed:
            assert isinstance(box, LocalContainer)
            made = await open_relayed_port(lambda: box._open_shell("root"), serve, FORWARDED_PORT)
        else:
            made = await box.forward_port(serve)  # type: ignore[attr-defined]
        try:
            yield asking(box, port_of(made))
        finally:
            await made.close()


@contextlib.asynccontextmanager
async def ways(names: list[str]) -> AsyncIterator[dict[str, Ask]]:
    """Opens them all."""
    spec = ContainerSpec("bench", docker_image="debian:bookworm-slim", network=NO_NETWORK)
    async with contextlib.AsyncExitStack() as stack:
        made = {"loopback": await stack.enter_async_context(plain())}
        if "local" in names:
            made["local"] = await stack.enter_async_context(
                forwarded_port(LocalContainerFactory()(ContainerSpec("bench")))
            )
        if "relay" in names:
            box = LocalContainerFactory()(ContainerSpec("bench"))
            made["local, by a relay"] = await stack.enter_async_context(forwarded_port(box, relayed=True))
        if "docker" in names:
            made["docker, as root"] = await stack.enter_async_context(forwarded_port(DockerContainerFactory()(spec)))
        if "remote" in names:
            from tests.docker.engine_forwarder import forwarded_engine

            os.environ["DOCKER_HOST"] = await stack.enter_async_context(forwarded_engine())
            made["docker, by a relay"] = await stack.enter_async_context(forwarded_port(DockerContainerFactory()(spec)))
        if "daytona" in names:
            from tests.daytona.emulator import Emulator

            emulator = await stack.enter_async_context(Emulator(box="local"))
            os.environ |= {"DAYTONA_API_KEY": emulator.api_key, "DAYTONA_API_URL": emulator.url}
            made["daytona's emulator"] = await stack.enter_async_context(
                forwarded_port(DaytonaContainerFactory()(spec))
            )
        yield made


async def main(names: list[str]) -> None:
    """Prints the table."""
    print(f"load average {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores")
    print("| forwarded port | request | p50 | p99 | added at p50 |\n|---|---|---|---|---|")
    async with ways(names) as made:
        for size in SIZES:
            seen: dict[str, list[float]] = {name: [] for name in made}
            for _ in range(ROUNDS):
                for name, ask in made.items():
                    count = SLOW_BLOCK if "daytona" in name else BLOCK
                    seen[name] += (await ask(size, count + 1))[1:]  # the first of a connection warms up
            base = statistics.median(seen["loopback"])
            for name, values in seen.items():
                p50, p99 = statistics.median(values), statistics.quantiles(values, n=100)[98]
                print(f"| {name} | {size // 1000} kB | {p50:.2f} ms | {p99:.2f} ms | {p50 - base:+.2f} ms |")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or ["local", "relay", "docker", "remote"]))
