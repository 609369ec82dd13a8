"""The emulator, driven by the real client: what the tests of the backend do not say by themselves of it."""

import asyncio
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import docker
import pytest
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromImageParams,
    DaytonaConfig,
    DaytonaConnectionError,
    DaytonaError,
    DaytonaNotFoundError,
    Image,
)

from tests.conftest import ROOT
from tests.daytona.conftest import said
from tests.daytona.emulator import Emulator, Fault

pytestmark = [pytest.mark.local, pytest.mark.once, pytest.mark.nightly]  # daily, other tests use the emulator


def client_of(api_key: str, api_url: str) -> AsyncDaytona:
    """A client, to be closed."""
    return AsyncDaytona(DaytonaConfig(api_key=api_key, api_url=api_url))


async def make(client: AsyncDaytona, image: str | Image = "debian:bookworm-slim") -> AsyncSandbox:
    """A sandbox whose commands are root's."""
    return await client.create(CreateSandboxFromImageParams(image=image, os_user="root"), timeout=100)


async def test_unknown_route_is_recorded(emulator: Emulator) -> None:
    async with client_of(emulator.api_key, emulator.url) as client:
        sandbox = await make(client)
        with pytest.raises(DaytonaNotFoundError):
            await sandbox.archive()
    assert emulator.unknown.pop() == f"POST /api/sandbox/{sandbox.id}/archive"


async def test_invalid_request_is_recorded(emulator: Emulator) -> None:
    headers = {"Authorization": f"Bearer {emulator.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{emulator.url}/sandbox", json={"name": "a", "nmae": "b"}) as answer,
    ):
        assert answer.status == 500
    assert emulator.invalid.pop() == "POST /api/sandbox: CreateSandbox has no nmae"


async def test_slow_reader_is_cut_off(emulator: Emulator) -> None:
    async def take(_: bytes) -> None: ...

    emulator.traffic.message_sec = 0.01
    async with client_of(emulator.api_key, emulator.url) as client:
        handle = await (await make(client)).process.create_pty_session("t", take)
        await handle.send_input(b"exec seq 1 1000000\r")
        assert (await asyncio.wait_for(handle.wait(), 60)).exit_code is None
    assert emulator.traffic.cut_off == 1


async def test_close_ends_requests_and_sandboxes_in_progress() -> None:
    before = _traces()
    async with Emulator() as emulator, client_of(emulator.api_key, emulator.url) as client:
        kept = await make(client)
        await said(kept, "mkfifo /tmp/started")
        running = asyncio.create_task(kept.process.exec("echo >/tmp/started; sleep 60"))
        await said(kept, "cat /tmp/started")
        slow = emulator.faults.add(Fault("slow", path="/api/sandbox/", seconds=60, times=None))
        creating = asyncio.create_task(make(client))
        await asyncio.wait_for(slow.met.wait(), 30)
        assert len(_traces()[0]) > 1
        await emulator.close()
        await asyncio.wait({running, creating})
        assert isinstance(running.exception(), DaytonaConnectionError)
        assert isinstance(creating.exception(), DaytonaError)
    assert emulator.sandboxes == {}
    assert _traces() == before


async def test_process_removes_everything_on_sigterm() -> None:
    serving = [sys.executable, "-m", "tests.daytona.emulator", "--box", "local"]
    process = await asyncio.create_subprocess_exec(*serving, cwd=ROOT, stdout=PIPE)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        found = re.fullmatch(r"export DAYTONA_API_KEY=(\S+) DAYTONA_API_URL=(\S+)\n", line)
        assert found is not None
        async with client_of(found[1], found[2]) as client:
            await make(client)
            assert _traces(process.pid) != (set(), set())
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert _traces(process.pid) == (set(), set())


@pytest.mark.docker
async def test_docker_containers_serve_as_sandboxes() -> None:
    """Images are built, the network is cut and given back, and nothing is left on the engine."""
    base = "debian:bookworm-slim"
    async with Emulator(box="docker") as emulator, client_of(emulator.api_key, emulator.url) as client:
        image = Image.base(base).env({"X": "y"}).run_commands("echo $X >/built").workdir("/srv")
        sandbox, _ = await asyncio.gather(make(client, image), make(client))
        assert await said(sandbox, "cat /built; pwd; echo $X") == "y\n/srv\ny\n"
        for blocked, domains, interfaces in ((False, None, 2), (True, None, 1), (False, None, 2), (False, "a.org", 1)):
            await sandbox.update_network_settings(network_block_all=blocked, domain_allow_list=domains)
            assert (await said(sandbox, "ls /sys/class/net")).count("\n") == interfaces
        containers = [one.box._container for one in emulator.sandboxes.values() if one.box is not None]
        names = [one.container_name for one in containers]  # type: ignore[union-attr]
        built = [one.image for one in containers if one.image != base]
    assert (len(names), len(built)) == (2, 1)
    engine = docker.from_env()
    try:
        assert [name for name in names if engine.containers.list(all=True, filters={"name": name})] == []
        assert [image for image in built if engine.images.list(image)] == []
    finally:
        engine.close()


def _traces(process: int | None = None) -> tuple[set[str], set[str]]:
    """Directories of the boxes and emulators of a process (default: this process), and the mounts in them."""
    mine = re.compile(rf"ares_exp-box-{process or os.getpid()}-|daytona-emulator-{process or os.getpid()}-")
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    names = {entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir()}
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return {name for name in names if mine.search(name)}, {line for line in mounts if mine.search(line)}
