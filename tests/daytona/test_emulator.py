"""The emulator, driven by the real client: how sandboxes and snapshots start, live and end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromSnapshotParams,
    CreateSnapshotParams,
    DaytonaAuthenticationError,
    DaytonaBadRequestError,
    DaytonaConflictError,
    DaytonaConnectionError,
    DaytonaError,
    DaytonaNotFoundError,
    Image,
    ListSandboxesQuery,
    Resources,
)
from daytona_api_client_async.exceptions import BadRequestException

from tests.daytona.emulator import Emulator
from tests.daytona.real_client import client_of, make, said

pytestmark = [pytest.mark.local, pytest.mark.once, pytest.mark.nightly]  # by day, the tests that use the emulator


@pytest_asyncio.fixture
async def client(emulator: Emulator) -> AsyncIterator[AsyncDaytona]:
    async with client_of(emulator) as client:
        yield client


@pytest_asyncio.fixture
async def sandbox(client: AsyncDaytona) -> AsyncSandbox:
    return await make(client)


async def _gone(emulator: Emulator, sandbox: AsyncSandbox) -> None:
    """Waits until nothing is left of it."""
    async with asyncio.timeout(30):
        while (state := emulator.sandboxes.get(sandbox.id)) is not None:
            await asyncio.wait_for(state.dies.wait(), 30)
            assert state.life is not None
            await asyncio.wait({state.life})


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
    assert made.body["buildInfo"] == {"dockerfileContent": "FROM debian:bookworm-slim\n"}
    assert {poll.path for poll in polls} == {f"/api/sandbox/{sandbox.id}"}
    state = emulator.sandboxes[sandbox.id]
    assert (state.name, state.params, state.state) == ("one", made.body, "started")
    found = await client.get("one")
    assert (found.id, found.cpu, found.disk, found.auto_stop_interval) == (sandbox.id, 2, 4, 7)
    assert found.domain_allow_list == "example.org"
    assert found.auto_destroy_at is not None
    assert found.labels["a"] == "b"


async def test_a_dockerfile_is_built(client: AsyncDaytona) -> None:
    image = Image.base("debian:bookworm-slim").env({"X": "y"}).run_commands("echo $X >/built").workdir("/srv")
    sandbox = await make(client, image=image)
    assert await said(sandbox, "cat /built; pwd; echo $X") == "y\n/srv\ny\n"


@pytest.mark.parametrize(
    ("image", "why"), [("images.invalid/none:1", "not found"), (Image.base("a").run_commands("false"), "false")]
)
async def test_a_build_that_fails_says_why(client: AsyncDaytona, image: str | Image, why: str) -> None:
    with pytest.raises(DaytonaError, match=f"(?s)BUILD_FAILED.*{why}"):
        await make(client, "one", image)
    assert str((await client.get("one")).state.value) == "build_failed"  # type: ignore[union-attr]


async def test_a_name_is_taken_until_its_sandbox_is_deleted(client: AsyncDaytona) -> None:
    first = await make(client, "one")
    with pytest.raises(DaytonaConflictError, match="one already exists"):
        await make(client, "one")
    await client.delete(first)
    assert (await make(client, "one")).id != first.id


async def test_the_quota_is_an_error_until_one_is_deleted(emulator: Emulator, client: AsyncDaytona) -> None:
    emulator.max_sandboxes = 1
    first = await make(client)
    with pytest.raises(DaytonaBadRequestError, match="limit exceeded"):
        await make(client)
    await client.delete(first)
    await make(client)


async def test_a_wrong_key_is_refused(emulator: Emulator) -> None:
    async with client_of(emulator, api_key="wrong") as client:
        with pytest.raises(DaytonaAuthenticationError):
            await client.get("one")


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
    made = await asyncio.gather(*(make(client, f"s{n}", labels={"odd": str(n % 2)}) for n in range(8)))
    emulator.requests.clear()
    odd = [one async for one in client.list(ListSandboxesQuery(labels={"odd": "1"}))]
    assert {one.name for one in odd} == {"s1", "s3", "s5", "s7"}
    assert len(emulator.requests) == 2
    async for one in client.list():  # deleting while it lists skips none
        await client.delete(one)
    assert [one async for one in client.list()] == []
    assert len(made) == 8


async def test_labels_are_replaced(client: AsyncDaytona, sandbox: AsyncSandbox) -> None:
    await sandbox.set_labels({"new": "1"})
    assert [one.id async for one in client.list(ListSandboxesQuery(labels={"new": "1"}))] == [sandbox.id]
    await sandbox.set_labels({"newer": "1"})
    assert [one.id async for one in client.list(ListSandboxesQuery(labels={"new": "1"}))] == []


async def test_a_stopped_sandbox_keeps_its_files(sandbox: AsyncSandbox) -> None:
    await said(sandbox, "echo kept >/srv/file")
    await sandbox.stop()
    with pytest.raises(DaytonaBadRequestError, match="not started"):
        await sandbox.process.exec("true")
    await sandbox.start()
    assert await said(sandbox, "cat /srv/file") == "kept\n"


async def test_auto_delete_zero_deletes_what_stops(emulator: Emulator, sandbox: AsyncSandbox) -> None:
    await sandbox.set_auto_delete_interval(0)
    with contextlib.suppress(DaytonaNotFoundError):  # the client waits for a stopped one
        await sandbox.stop()
    await _gone(emulator, sandbox)
    assert emulator.sandboxes == {}


async def test_a_ttl_ends_a_sandbox_whatever_it_does(emulator: Emulator, client: AsyncDaytona) -> None:
    sandbox = await make(client, ttl_minutes=60)
    emulator.minute = 0.001
    await sandbox.set_ttl(1)
    await _gone(emulator, sandbox)
    with pytest.raises(DaytonaNotFoundError):
        await client.get(sandbox.id)


async def test_a_ttl_can_be_put_off(emulator: Emulator, client: AsyncDaytona) -> None:
    sandbox = await make(client, ttl_minutes=60)
    first = emulator.sandboxes[sandbox.id].expiry
    await sandbox.set_ttl(120)
    second = emulator.sandboxes[sandbox.id].expiry
    assert first is not None
    assert second is not None
    assert first.cancelled()
    assert second.when() >= first.when() + 60 * 60
    await sandbox.set_ttl(0)
    assert emulator.sandboxes[sandbox.id].expiry is None


async def test_an_idle_sandbox_stops_and_activity_puts_it_off(emulator: Emulator, client: AsyncDaytona) -> None:
    sandbox = await make(client, auto_delete_interval=0)
    state = emulator.sandboxes[sandbox.id]
    for do in (sandbox.refresh_activity, lambda: sandbox.process.exec("true")):
        before = state.last_activity
        await do()
        assert state.last_activity > before
    emulator.minute = 0.001
    await sandbox.set_autostop_interval(1)
    await _gone(emulator, sandbox)


async def test_a_sandbox_that_dies_is_gone_and_answers_nobody(emulator: Emulator, client: AsyncDaytona) -> None:
    sandbox = await make(client, "one")
    await said(sandbox, "mkfifo /tmp/a /tmp/b")
    running = asyncio.create_task(sandbox.process.exec("echo >/tmp/a; cat /tmp/b"))
    await said(sandbox, "cat /tmp/a")
    emulator.lose(sandbox.id)
    with pytest.raises(DaytonaConnectionError):
        await running
    with pytest.raises(DaytonaNotFoundError):
        await sandbox.process.exec("true")
    with pytest.raises(DaytonaNotFoundError):
        await client.get("one")


async def test_a_sandbox_that_dies_may_still_be_shown(emulator: Emulator, client: AsyncDaytona) -> None:
    sandbox = await make(client, "one")
    emulator.lose(sandbox.id, "error")
    assert str((await client.get("one")).state.value) == "error"  # type: ignore[union-attr]
    with pytest.raises(DaytonaBadRequestError, match="not started"):
        await sandbox.process.exec("true")


async def test_network_settings_are_shown(sandbox: AsyncSandbox) -> None:
    await sandbox.update_network_settings(network_block_all=True)
    await sandbox.refresh_data()
    assert sandbox.network_block_all is True
    await sandbox.update_network_settings(network_block_all=False, domain_allow_list="example.org")
    await sandbox.refresh_data()
    assert (sandbox.network_block_all, sandbox.domain_allow_list) == (False, "example.org")


async def test_a_fork_starts_with_the_files_and_goes_its_own_way(emulator: Emulator, client: AsyncDaytona) -> None:
    sandbox = await make(client, labels={"a": "b"})
    await said(sandbox, "echo 1 >/srv/file; rm /etc/hostname")
    fork = await sandbox.fork("fork")
    assert await said(fork, "cat /srv/file; ls /etc/hostname 2>&1 | wc -l; echo 2 >/srv/file") == "1\n1\n"
    assert await said(sandbox, "cat /srv/file") == "1\n"
    grandchild = await fork.fork()
    assert await said(grandchild, "cat /srv/file") == "2\n"
    assert grandchild.labels["a"] == "b"
    emulator.can_fork = False
    with pytest.raises(DaytonaError, match="not supported"):
        await sandbox.fork()


async def test_a_snapshot_outlives_its_sandbox(client: AsyncDaytona, sandbox: AsyncSandbox) -> None:
    await said(sandbox, "mkdir /data; echo kept >/data/file; chmod 600 /data/file")
    await sandbox.create_snapshot("snap")
    with pytest.raises(DaytonaConflictError):
        await sandbox.create_snapshot("snap")
    await client.delete(sandbox, wait=True)
    copy = await client.create(CreateSandboxFromSnapshotParams(snapshot="snap", os_user="root"))
    assert await said(copy, "cat /data/file; stat -c %a /data/file") == "kept\n600\n"
    await client.snapshot.delete(await client.snapshot.get("snap"))
    with pytest.raises(DaytonaBadRequestError, match="snap not found"):
        await client.create(CreateSandboxFromSnapshotParams(snapshot="snap"))


async def test_snapshots_are_made_from_images_and_listed_in_pages(emulator: Emulator, client: AsyncDaytona) -> None:
    emulator.page_size = 1
    await client.snapshot.create(CreateSnapshotParams(name="mine", image="debian:bookworm-slim"))
    pages = [await client.snapshot.list(page=page) for page in (1, 2)]
    assert [one.name for page in pages for one in page.items] == ["daytona-small", "mine"]
    with pytest.raises(DaytonaConflictError):
        await client.snapshot.create(CreateSnapshotParams(name="mine", image="debian:bookworm-slim"))
    with pytest.raises(BadRequestException, match="already active"):  # the SDK passes the lower layer's error on
        await client.snapshot.activate("mine")
    with pytest.raises(DaytonaNotFoundError):
        await client.snapshot.get("none")


async def test_there_is_no_object_storage(client: AsyncDaytona, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DaytonaError, match="not configured") as caught:
        await make(client, image=Image.base("a").add_local_file(str(tmp_path / "file"), "/file"))
    assert caught.value.status_code == 503
