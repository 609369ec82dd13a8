"""The emulator, driven by the real client: how it misbehaves on demand, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    DaytonaConfig,
    DaytonaConnectionError,
    DaytonaError,
    DaytonaNotFoundError,
    DaytonaRateLimitError,
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


async def test_a_status_is_answered_and_nothing_done(emulator: Emulator, client: AsyncDaytona) -> None:
    fault = emulator.faults.add(Fault("status", "POST", r"/sandbox$", status=429, retry_after=7))
    with pytest.raises(DaytonaRateLimitError) as caught:
        await make(client)
    assert (caught.value.headers or {})["Retry-After"] == "7"
    assert (fault.hits, emulator.sandboxes, emulator.requests[-1].status) == (1, {}, 429)
    await make(client)


async def test_a_status_can_come_after_the_deed(emulator: Emulator, client: AsyncDaytona) -> None:
    emulator.faults.add(Fault("status_after", "POST", r"/sandbox$", status=502, body="<html>Bad Gateway</html>"))
    with pytest.raises(DaytonaError) as caught:
        await make(client, "one")
    assert caught.value.status_code == 502
    assert [one.name for one in emulator.sandboxes.values()] == ["one"]


@pytest.mark.parametrize(("kind", "made"), [("drop", 0), ("drop_after", 1), ("half", 1)])
async def test_a_connection_is_cut(emulator: Emulator, client: AsyncDaytona, kind: str, made: int) -> None:
    emulator.faults.add(Fault(kind, "POST", r"/sandbox$"))  # type: ignore[arg-type]
    with pytest.raises(DaytonaConnectionError):
        await make(client)
    assert len(emulator.sandboxes) == made
    assert emulator.requests[-1].status is None


async def test_half_of_a_download_is_no_download(emulator: Emulator, sandbox: AsyncSandbox) -> None:
    await sandbox.fs.upload_file(b"x" * 1000000, "/tmp/file")
    emulator.faults.add(Fault("half", path="bulk-download", skip=1))
    assert len(await sandbox.fs.download_file("/tmp/file")) == 1000000
    with pytest.raises(DaytonaConnectionError):
        await sandbox.fs.download_file("/tmp/file")


async def test_a_slow_answer_comes_later(emulator: Emulator, sandbox: AsyncSandbox) -> None:
    emulator.faults.add(Fault("slow", path="/process/execute", seconds=0.2, times=None))
    before = time.monotonic()
    assert await said(sandbox, "echo here") == "here\n"
    assert time.monotonic() - before >= 0.2
    emulator.faults.clear()


async def test_a_sandbox_is_lost_at_a_request(emulator: Emulator, client: AsyncDaytona, sandbox: AsyncSandbox) -> None:
    emulator.faults.add(Fault("lost", path="/process/execute"))
    with pytest.raises(DaytonaNotFoundError):
        await sandbox.process.exec("true")
    with pytest.raises(DaytonaNotFoundError):
        await client.get(sandbox.id)


async def test_nothing_is_left_of_what_is_in_the_middle_of_something() -> None:
    before = _traces()
    async with Emulator() as emulator, client_of(emulator) as client:
        kept, forked = await asyncio.gather(make(client), make(client))
        await forked.fork()
        await kept.process.create_session("s")
        await said(kept, "mkfifo /tmp/started")
        running = asyncio.create_task(kept.process.exec("echo >/tmp/started; sleep 60"))
        await said(kept, "cat /tmp/started")
        slow = emulator.faults.add(Fault("slow", path="/api/sandbox/", seconds=60, times=None))
        creating = asyncio.create_task(make(client))
        await asyncio.wait_for(slow.met.wait(), 30)
        assert len(_traces()[0]) > 3
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_its_own_process_removes_everything_when_it_is_told_to_end(number: signal.Signals) -> None:
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
            process.send_signal(number)
            assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert _traces(process.pid) == (set(), set())


def _traces(process: int | None = None) -> tuple[set[str], set[str]]:
    """Directories of the boxes and emulators of a process (default: this one), and what is mounted in them."""
    mine = re.compile(rf"ares_exp-box-{process or os.getpid()}-|daytona-emulator-{process or os.getpid()}-")
    folders = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    names = {entry.name for folder in folders if folder.is_dir() for entry in folder.iterdir()}
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return {name for name in names if mine.search(name)}, {line for line in mounts if mine.search(line)}
