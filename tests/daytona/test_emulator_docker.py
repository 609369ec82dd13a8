"""The emulator with Docker containers as sandboxes: images are built, files copied, networks cut; nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import docker
import pytest
import pytest_asyncio
from daytona import (
    AsyncDaytona,
    CreateSandboxFromSnapshotParams,
    DaytonaError,
    DaytonaProcessExecutionTimeoutError,
    Image,
)

from tests.daytona.emulator import Emulator
from tests.daytona.real_client import client_of, make, said

pytestmark = [pytest.mark.docker, pytest.mark.once, pytest.mark.nightly]  # by day, on local boxes
IMAGE = "debian:bookworm-slim"


@pytest_asyncio.fixture
async def client() -> AsyncIterator[AsyncDaytona]:
    async with (
        Emulator(box="docker") as emulator,
        client_of(emulator) as client,
    ):
        yield client


async def test_commands_and_files(client: AsyncDaytona) -> None:
    sandbox = await make(client)
    done = await sandbox.process.exec("echo a; echo b >&2; pwd; exit 3", cwd="/usr")
    assert (done.exit_code, sorted(str(done.result).split())) == (3, ["/usr", "a", "b"])
    await sandbox.fs.upload_file(b"\0content" * 100000, "/tmp/new/file")
    assert await sandbox.fs.download_file("/tmp/new/file") == b"\0content" * 100000
    with pytest.raises(DaytonaProcessExecutionTimeoutError):
        await sandbox.process.exec("sleep 61.5", timeout=1)
    assert await said(sandbox, "grep -l 61.5 /proc/[0-9]*/cmdline 2>/dev/null") == ""


async def test_forks_and_snapshots_have_the_files(client: AsyncDaytona) -> None:
    sandbox = await make(client)
    await said(sandbox, "echo kept >/srv/file; rm -r /etc/apt")
    fork = await sandbox.fork()
    await sandbox.create_snapshot("snap")
    copy = await client.create(CreateSandboxFromSnapshotParams(snapshot="snap", os_user="root"), timeout=100)
    for one in (fork, copy):
        assert await said(one, "cat /srv/file; test -e /etc/apt || echo gone") == "kept\ngone\n"
    await sandbox.stop()
    await sandbox.start()
    assert await said(sandbox, "cat /srv/file") == "kept\n"


async def test_the_network_is_cut_and_given_back(client: AsyncDaytona) -> None:
    sandbox = await make(client)
    for blocked, domains, interfaces in ((False, None, 2), (True, None, 1), (False, None, 2), (False, "a.org", 1)):
        await sandbox.update_network_settings(network_block_all=blocked, domain_allow_list=domains)
        assert (await said(sandbox, "ls /sys/class/net")).count("\n") == interfaces


async def test_nothing_is_left_on_the_engine() -> None:
    async with (
        Emulator(box="docker") as emulator,
        client_of(emulator) as client,
    ):
        image = Image.base(IMAGE).env({"X": "y"}).run_commands("echo $X >/built").workdir("/srv")
        sandbox, _ = await asyncio.gather(make(client, image=image), make(client))
        assert await said(sandbox, "cat /built; pwd; echo $X") == "y\n/srv\ny\n"
        with pytest.raises(DaytonaError, match=r"(?s)BUILD_FAILED.*exit 5"):
            await make(client, image=Image.base(IMAGE).run_commands("exit 5"))
        containers = [one.box._container for one in emulator.sandboxes.values() if one.box is not None]
        names = [one.container_name for one in containers]  # type: ignore[union-attr]
        built = [one.image for one in containers if one.image != IMAGE]
    assert (len(names), len(built)) == (2, 1)
    engine = docker.from_env()
    try:
        assert [name for name in names if engine.containers.list(all=True, filters={"name": name})] == []
        assert [image for image in built if engine.images.list(image)] == []
    finally:
        engine.close()
