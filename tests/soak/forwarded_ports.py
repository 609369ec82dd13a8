"""Forwarded ports under much data, and of many processes that are killed.

Run by hand, as root, with an engine: `python -m tests.soak.forwarded_ports KILLS`. Prints a line for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import time
from collections.abc import AsyncIterator

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.forwarded_port import ForwardedPort
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.network_policy import NO_NETWORK
from ares_exp.testing.forwarded_port_contract import COPY, Server, echo, perl, port_of
from tests.daytona.emulator import Emulator
from tests.docker.engine_forwarder import forwarded_engine
from tests.killed_forwarded_port import killed_forwarded_port

MIB, AT_ONCE = 64, 8


async def much_data(what: str, box: Container) -> None:
    """Sends random bytes over connections at the same time, and compares what comes back."""
    async with box:
        forwarded_port: ForwardedPort = await box.forward_port(Server(echo))  # type: ignore[attr-defined]
        started = time.monotonic()
        carry = f"{perl(COPY, port_of(forwarded_port))} </tmp/$N | cmp - /tmp/$N"
        copy = f"head -c {MIB * 2**20} /dev/urandom >/tmp/$N; {carry}; rm /tmp/$N"
        done = await asyncio.gather(*(box.exec(copy, env={"N": str(n)}) for n in range(AT_ONCE)))
        assert [one.output for one in done] == [""] * AT_ONCE, done
        await forwarded_port.close()
        seconds, peak = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"{what}: {AT_ONCE} x {MIB} MiB each way in {seconds:.1f} s, our peak {peak} MiB", flush=True)


@contextlib.asynccontextmanager
async def environment(is_remote: bool) -> AsyncIterator[dict[str, str]]:
    """The variables that name the engine."""
    async with contextlib.AsyncExitStack() as stack:
        yield {"DOCKER_HOST": await stack.enter_async_context(forwarded_engine())} if is_remote else {}


async def kills(what: str, backend: str, count: int, *, is_remote: bool = False) -> None:
    """Kills processes with an open forwarded port; says how long the slowest of them was open."""
    slowest = 0.0
    for _ in range(count):
        async with environment(is_remote) as env, killed_forwarded_port(backend, env) as forwarded_port:
            started = time.monotonic()
            assert await asyncio.to_thread(forwarded_port.is_gone), "it is still open"
            slowest = max(slowest, time.monotonic() - started)
    print(f"{what}: {count} killed, the slowest forwarded port closed after {slowest:.2f} s", flush=True)


async def main(count: int) -> None:
    """Runs all of it."""
    spec = ContainerSpec("soak", docker_image="debian:bookworm-slim", network=NO_NETWORK)
    await much_data("local", LocalContainerFactory()(ContainerSpec("soak")))
    await much_data("docker", DockerContainerFactory()(spec))
    async with environment(is_remote=True) as env:
        os.environ |= env
        await much_data("docker, by a relay", DockerContainerFactory()(spec))
        del os.environ["DOCKER_HOST"]
    await kills("local", "local", count)
    await kills("docker", "docker", count)
    await kills("docker, by a relay", "docker", count, is_remote=True)
    async with Emulator() as emulator:
        os.environ |= {"DAYTONA_API_KEY": emulator.api_key, "DAYTONA_API_URL": emulator.url}
        await kills("daytona's emulator", "daytona", count)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
