"""A process with an open forwarded port that is killed, and what is left of the forwarded port."""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from tests.leaks import processes, wait_until

RUNNER = """
import asyncio, json, sys
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.network_policy import NO_NETWORK
from ares_exp.testing.forwarded_port_contract import Server, echo

async def main(backend, port):
    if backend == "local":
        from ares_exp.containers.local import LocalContainerFactory as Factory
    elif backend == "docker":
        from ares_exp.containers.docker import DockerContainerFactory as Factory
    else:
        from ares_exp.containers.daytona.factory import DaytonaContainerFactory as Factory
    image = None if backend == "local" else "debian:bookworm-slim"
    spec = ContainerSpec("killed", docker_image=image, network=NO_NETWORK)
    async with Factory()(spec) as box:
        forwarded_port = await box.forward_port(Server(echo), port=int(port))
        if backend == "local":
            pid = json.loads((box._directory.path / "namespaces").read_text())["child-pid"]
        elif backend == "daytona":
            pid = None  # nothing but its relay is known to this machine
        else:
            pid = box._engine.api.inspect_container(box.container_name)["State"]["Pid"]
        print(json.dumps([pid, int(forwarded_port.url.rpartition(":")[2])]), flush=True)
        await asyncio.sleep(300)

asyncio.run(main(*sys.argv[1:]))
"""


def relays(port: int) -> set[int]:
    """Relays that try `port`. Other tests may open relays at the same time."""
    return {pid for pid, _, _, words in processes() if "The relay in" in words and f" {port} " in words}


class KilledForwardedPort:
    """The forwarded port of a process that has been killed.

    Attributes:
        relays: Relays that ran while it was open.
    """

    def __init__(self, namespace: int, port: int, relays: set[int]) -> None:
        self.relays = relays
        self._namespace = namespace
        self._port = port

    @property
    def is_open(self) -> bool:
        """Whether something listens there, which needs no process in the container."""
        enter = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespace}"]
        seen = subprocess.run([*enter, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
        return f"0100007F:{self._port:04X} 00000000:0000 0A" in seen

    def is_gone(self) -> bool:
        return wait_until(lambda: not self.is_open and not relays(self._port))


@contextlib.asynccontextmanager
async def killed_forwarded_port(backend: str, env: Mapping[str, str]) -> AsyncIterator[KilledForwardedPort]:
    """Opens a forwarded port in a process of its own, and kills that with SIGKILL for the body."""
    first_port = random.randrange(20_000, 30_000)  # below the ports that the kernel chooses
    runner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUNNER, backend, str(first_port)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **env},
    )
    try:
        assert runner.stdout is not None
        pid, port = json.loads(await runner.stdout.readline())
        started = relays(first_port)
        namespace = os.open(Path("/proc", str(pid or next(iter(started))), "ns", "net"), os.O_RDONLY)
        try:
            forwarded_port = KilledForwardedPort(namespace, port, started)
            assert forwarded_port.is_open
            runner.kill()
            await runner.wait()
            yield forwarded_port
        finally:
            os.close(namespace)
    finally:
        with contextlib.suppress(ProcessLookupError):
            runner.kill()
        await runner.wait()
