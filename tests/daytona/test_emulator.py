"""The emulator, driven by the real client: what the tests of the backend do not say by themselves of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import docker
import pytest
import pytest_asyncio
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    DaytonaConfig,
    DaytonaConnectionError,
    DaytonaError,
    DaytonaNotFoundError,
    DaytonaProcessExecutionTimeoutError,
    FileDownloadRequest,
    FileUpload,
    Image,
    ListSandboxesQuery,
    Resources,
)

from tests.conftest import ROOT
from tests.daytona.emulator import Emulator, Fault
from tests.daytona.emulator.boxes import Boxes, Demand, Source
from tests.daytona.real_client import client_of, make, said

pytestmark = [pytest.mark.local, pytest.mark.once, pytest.mark.nightly]  # by day, the tests that use the emulator


@pytest_asyncio.fixture
async def client(emulator: Emulator) -> AsyncIterator[AsyncDaytona]:
    async with client_of(emulator) as client:
        yield client


@pytest_asyncio.fixture
async def sandbox(client: AsyncDaytona) -> AsyncSandbox:
    return await make(client)


async def test_a_sandbox_starts_behind_the_answer_to_its_creation(emulator: Emulator, client: AsyncDaytona) -> None:
    sandbox = await make(
        client,
        "one",
        labels={"a": "b"},
        resources=Resources(cpu=2, memory=1, disk=4),
        ttl_minutes=30,
        auto_stop_interval=7,
        auto_delete_interval=0,
        domain_allow_list="example.org",
    )
    made, *polls = emulator.requests
    assert (made.method, made.path, made.status) == ("POST", "/api/sandbox", 200)
    assert {poll.path for poll in polls} == {f"/api/sandbox/{sandbox.id}"}
    found = await client.get("one")
    assert (found.id, found.cpu, found.disk, found.auto_stop_interval) == (sandbox.id, 2, 4, 7)
    assert (found.domain_allow_list, found.labels["a"]) == ("example.org", "b")
    assert found.auto_destroy_at is not None


async def test_a_build(client: AsyncDaytona) -> None:
    image = Image.base("debian:bookworm-slim").env({"X": "y"}).run_commands("echo $X >/built").workdir("/srv")
    assert await said(await make(client, image=image), "cat /built; pwd; echo $X") == "y\n/srv\ny\n"
    with pytest.raises(DaytonaError, match=r"(?s)BUILD_FAILED.*false"):
        await make(client, "one", Image.base("a").run_commands("false"))
    assert str((await client.get("one")).state.value) == "build_failed"  # type: ignore[union-attr]


async def test_an_unknown_route_is_recorded(emulator: Emulator, sandbox: AsyncSandbox) -> None:
    with pytest.raises(DaytonaNotFoundError):
        await sandbox.archive()
    assert emulator.unknown.pop() == f"POST /api/sandbox/{sandbox.id}/archive"


async def test_a_message_that_no_client_sends_is_recorded(emulator: Emulator) -> None:
    headers = {"Authorization": f"Bearer {emulator.api_key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{emulator.url}/sandbox", json={"name": "a", "nmae": "b"}) as answer,
    ):
        assert answer.status == 500
    assert emulator.invalid.pop() == "POST /api/sandbox: CreateSandbox has no nmae"


async def test_sandboxes_are_listed_by_label_in_pages(emulator: Emulator, client: AsyncDaytona) -> None:
    await asyncio.gather(*(make(client, f"s{n}", labels={"odd": str(n % 2)}) for n in range(8)))
    emulator.requests.clear()
    odd = [one async for one in client.list(ListSandboxesQuery(labels={"odd": "1"}))]
    assert {one.name for one in odd} == {"s1", "s3", "s5", "s7"}
    assert len(emulator.requests) == 2
    async for one in client.list():  # deleting while it lists skips none
        await client.delete(one)
    assert [one async for one in client.list()] == []


async def test_activity_puts_off_the_end_of_an_idle_sandbox(emulator: Emulator, client: AsyncDaytona) -> None:
    emulator.minute = 0.05
    sandbox = await make(client, auto_stop_interval=10, auto_delete_interval=0)
    state = emulator.sandboxes[sandbox.id]
    for do in (sandbox.refresh_activity, lambda: sandbox.process.exec("true")):
        before = state.last_activity
        await do()
        assert state.last_activity > before
    await asyncio.wait_for(state.dies.wait(), 60)


async def test_a_command(sandbox: AsyncSandbox) -> None:
    done = await sandbox.process.exec("echo a; echo b >&2; printf '\\377'; exit 7")
    assert (done.exit_code, done.result) == (7, "a\nb\n\ufffd")
    with pytest.raises(DaytonaProcessExecutionTimeoutError) as caught:
        await sandbox.process.exec("echo lost; sleep 60", timeout=1)
    assert (caught.value.status_code, caught.value.code) == (408, "PROCESS_EXECUTION_TIMEOUT")


async def test_a_client_that_takes_output_too_slowly_is_cut_off(emulator: Emulator, sandbox: AsyncSandbox) -> None:
    async def take(_: bytes) -> None: ...

    emulator.traffic.message_sec = 0.01
    handle = await sandbox.process.create_pty_session("t", take)
    await handle.send_input(b"exec seq 1 1000000\r")
    assert (await asyncio.wait_for(handle.wait(), 60)).exit_code is None
    assert emulator.traffic.cut_off == 1


async def test_files_go_in_and_come_out(sandbox: AsyncSandbox) -> None:
    content = os.urandom(3 * 1024 * 1024)
    names = ["/tmp/new/a b'c", "relative.bin", "/tmp/é"]
    await sandbox.fs.upload_files([FileUpload(source=content + name.encode(), destination=name) for name in names])
    assert await said(sandbox, "stat -c '%a %U' /tmp/new/*") == "644 root\n"
    paths = [*names, "/tmp/none", "/tmp"]
    got = await sandbox.fs.download_files([FileDownloadRequest(source=path) for path in paths])
    assert [one.result for one in got[:3]] == [content + name.encode() for name in names]
    codes = [one.error_details and one.error_details.code for one in got[3:]]
    assert codes == ["FILE_NOT_FOUND", "INVALID_FILE_PATH"]
    with pytest.raises(DaytonaError, match="400: /dev/null/x"):
        await sandbox.fs.upload_files([FileUpload(source=b"", destination="/dev/null/x")])
    await sandbox.fs.delete_file("/tmp/é")
    with pytest.raises(DaytonaNotFoundError):
        await sandbox.fs.delete_file("/tmp/é")


async def test_nothing_is_left_of_what_is_in_the_middle_of_something() -> None:
    before = _traces()
    async with Emulator() as emulator, client_of(emulator) as client:
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


async def test_a_start_that_is_cut_short_writes_nothing_behind_the_removal() -> None:
    before = _traces()
    for number in range(20):
        boxes = Boxes("local")
        await boxes.open()
        starting = asyncio.create_task(boxes.start(Source("FROM debian\n"), Demand(), user=None, blocked=True))
        await asyncio.sleep(number * 1e-4)
        starting.cancel()
        await asyncio.wait({starting})
        await boxes.close()
    await asyncio.sleep(0.1)
    assert _traces() == before


async def test_its_own_process_removes_everything_when_it_is_told_to_end() -> None:
    serving = [sys.executable, "-m", "tests.daytona.emulator", "--box", "local"]
    process = await asyncio.create_subprocess_exec(*serving, cwd=ROOT, stdout=PIPE)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        found = re.fullmatch(r"export DAYTONA_API_KEY=(\S+) DAYTONA_API_URL=(\S+)\n", line)
        assert found is not None
        async with AsyncDaytona(DaytonaConfig(api_key=found[1], api_url=found[2])) as client:
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
async def test_docker_containers_as_sandboxes() -> None:
    """Images are built, the network is cut and given back, and nothing is left on the engine."""
    base = "debian:bookworm-slim"
    async with Emulator(box="docker") as emulator, client_of(emulator) as client:
        image = Image.base(base).env({"X": "y"}).run_commands("echo $X >/built").workdir("/srv")
        sandbox, _ = await asyncio.gather(make(client, image=image), make(client))
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
    """Directories of the boxes and emulators of a process (default: this one), and what is mounted in them."""
    mine = re.compile(rf"ares_exp-box-{process or os.getpid()}-|daytona-emulator-{process or os.getpid()}-")
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    names = {entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir()}
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return {name for name in names if mine.search(name)}, {line for line in mounts if mine.search(line)}
