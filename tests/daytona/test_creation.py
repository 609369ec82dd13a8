"""Creation of sandboxes, their time to live, and snapshots that the service makes."""

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest
from daytona import AsyncSandbox, CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams

from ares_exp.containers.daytona.factory import find_all
from ares_exp.containers.daytona.provider_snapshot import (
    KEPT_PREFIX,
    delete_kept,
    find_kept,
    keep_files,
    make_ready,
    snapshot_to_start_from,
)
from ares_exp.containers.daytona.service import DaytonaService, create_sandbox, delete_sandbox
from ares_exp.containers.filesystem.delta import Delta, StoredChanges
from ares_exp.containers.filesystem.delta_encoding import get_delta, put_delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.ownership import owner_labels
from ares_exp.errors import (
    CaptureError,
    ContainerDiedError,
    ContainerServiceError,
    ContainerServiceUnavailableError,
    ContainerStartError,
    EnvironmentStartTimeoutError,
    SnapshotMismatchError,
)
from tests.daytona.emulator import Emulator, Fault
from tests.leaks import until

pytestmark = [pytest.mark.local, pytest.mark.once]

CREATION = "/api/sandbox$"
NAME = "ares-exp-one"


def params() -> CreateSandboxFromSnapshotParams:
    return CreateSandboxFromSnapshotParams(labels={"a": "b"}, ttl_minutes=60)


def asked(emulator: Emulator) -> list[int | None]:
    """How each request for a sandbox was answered."""
    return [
        request.status for request in emulator.requests if (request.method, request.path) == ("POST", "/api/sandbox")
    ]


async def nothing_is_left(emulator: Emulator, service: DaytonaService) -> None:
    assert service.creating == {}
    await until(lambda: not emulator.sandboxes)


@pytest.mark.parametrize("fault", [
    Fault("status_after", "POST", CREATION, status=500),
    Fault("status_after", "POST", CREATION, status=504),
    Fault("drop_after", "POST", CREATION),
    Fault("status", "POST", CREATION, status=503, times=2),
    Fault("drop", "POST", CREATION),
    Fault("status", "POST", CREATION, status=429, retry_after=0),
    Fault("status_after", "POST", CREATION, status=200, body="<html>"),
    Fault("half", "POST", CREATION),
    Fault("status", "GET", "/api/sandbox/", status=502, times=3),
    Fault("status", "GET", "/api/sandbox/", status=429, times=3),
], ids=lambda fault: f"{fault.kind}-{fault.method}-{fault.status}")  # fmt: skip
async def test_exactly_one_sandbox_exists_after_faults(
    emulator: Emulator, service: DaytonaService, fault: Fault
) -> None:
    emulator.faults.add(fault)
    sandbox = await create_sandbox(service, params(), name=NAME, timeout_sec=60)
    assert fault.hits or fault.method == "GET"  # it may run before it is looked at
    assert [one.id for one in emulator.sandboxes.values()] == [sandbox.id]
    assert (await sandbox.process.exec("echo here")).result == "here\n"
    await delete_sandbox(service, NAME)
    await nothing_is_left(emulator, service)


async def test_existing_sandbox_is_adopted(emulator: Emulator, service: DaytonaService) -> None:
    """A request whose answer got lost on its way through a proxy that then sent it again."""
    there = await service.client.create(params().model_copy(update={"name": NAME}))
    sandbox = await create_sandbox(service, params(), name=NAME, timeout_sec=60)
    assert (sandbox.id, len(emulator.sandboxes)) == (there.id, 1)
    assert asked(emulator) == [200, 409]


async def test_missing_image_is_a_start_error(emulator: Emulator, service: DaytonaService) -> None:
    wanted = CreateSandboxFromImageParams(image="registry.invalid/nothing:1")
    with pytest.raises(ContainerStartError, match=r"its image could not be built: failed to pull registry\.invalid"):
        await create_sandbox(service, wanted, name=NAME, timeout_sec=60)
    assert len(asked(emulator)) == 1
    await nothing_is_left(emulator, service)


async def test_unavailable_service_leaves_no_sandbox(
    emulator: Emulator, service: DaytonaService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ares_exp.containers.daytona.service.APPEARS_WITHIN_SEC", 0.2)
    emulator.faults.add(Fault("status", "POST", CREATION, status=503, times=None))
    with pytest.raises((ContainerServiceUnavailableError, EnvironmentStartTimeoutError)):
        await create_sandbox(service, params(), name=NAME, timeout_sec=0.5)
    await nothing_is_left(emulator, service)


async def test_slow_creation_times_out(emulator: Emulator, service: DaytonaService) -> None:
    """It is given up before the service even starts, and then found and removed."""
    emulator.faults.add(Fault("slow", "POST", CREATION, seconds=1))
    with pytest.raises(EnvironmentStartTimeoutError, match=f"The sandbox {NAME} did not start within 0"):
        await create_sandbox(service, params(), name=NAME, timeout_sec=0.2)
    assert asked(emulator) == [200]
    await nothing_is_left(emulator, service)


async def test_removal_during_creation_fails_the_creation(emulator: Emulator, service: DaytonaService) -> None:
    """The creation fails; it is not as if its task had been cancelled."""
    emulator.faults.add(Fault("slow", "POST", CREATION, seconds=0.5))
    making = asyncio.ensure_future(create_sandbox(service, params(), name=NAME, timeout_sec=60))
    await until(lambda: emulator.requests)
    await delete_sandbox(service, NAME)
    with pytest.raises(ContainerDiedError):
        await making
    await nothing_is_left(emulator, service)


@pytest.mark.parametrize("fault", [
    Fault("status", "DELETE", status=409, times=2, body={"message": "Sandbox state change in progress"}),
    Fault("lost", "DELETE"),
], ids=["its state changes", "it disappears"])  # fmt: skip
async def test_changing_sandbox_is_removed(emulator: Emulator, service: DaytonaService, fault: Fault) -> None:
    await delete_sandbox(service, NAME)  # there is none yet
    await create_sandbox(service, params(), name=NAME, timeout_sec=60)
    emulator.faults.add(fault)
    await delete_sandbox(service, NAME)
    assert fault.times == 0
    await nothing_is_left(emulator, service)


async def test_closed_connection_ends_creations(emulator: Emulator, service: DaytonaService) -> None:
    emulator.faults.add(Fault("slow", "POST", CREATION, seconds=0.5))
    making = asyncio.ensure_future(create_sandbox(service, params(), name=NAME, timeout_sec=60))
    await until(lambda: emulator.requests)
    await service.close()
    with contextlib.suppress(ContainerServiceError, ContainerDiedError):
        await making
    assert making.done()
    assert not making.cancelled()


@pytest.fixture
def renewing(service: DaytonaService) -> DaytonaService:
    service.minute_sec = 0.05
    return service


async def new(service: DaytonaService) -> AsyncSandbox:
    return await service.client.create(CreateSandboxFromSnapshotParams())


def count(emulator: Emulator, sandbox: AsyncSandbox, what: str) -> int:
    return sum(request.path == f"/api/sandbox/{sandbox.id}/{what}" for request in emulator.requests)


async def test_keepalive_extends_the_ttl_repeatedly(emulator: Emulator, renewing: DaytonaService) -> None:
    first, second = await new(renewing), await new(renewing)
    renewing.keep_alive(first, 3)
    renewing.keep_alive(second, 6)
    for sandbox, ttl in ((first, "ttl/3"), (second, "ttl/6")):
        await until(lambda: count(emulator, sandbox, ttl) >= 3)  # noqa: B023
        await until(lambda: count(emulator, sandbox, "last-activity") >= 3)  # noqa: B023
    assert all(sandbox.expiry is not None for sandbox in emulator.sandboxes.values())


async def test_lost_and_discarded_sandboxes_are_not_renewed(
    emulator: Emulator, renewing: DaytonaService, caplog: pytest.LogCaptureFixture
) -> None:
    lost, left, kept = [await new(renewing) for _ in range(3)]
    emulator.lose(lost.id)
    for sandbox in (lost, left, kept):
        renewing.keep_alive(sandbox, 3)
    renewing.let_expire(left)
    renewing.let_expire(left)
    await until(lambda: count(emulator, kept, "ttl/3") >= 4)
    assert [count(emulator, sandbox, "ttl/3") for sandbox in (lost, left)] == [1, 0]
    assert not caplog.records


async def test_failures_cause_only_one_warning(
    emulator: Emulator, renewing: DaytonaService, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = await new(renewing)
    refusal = emulator.faults.add(Fault("status", "POST", "/ttl/3", status=403, times=3))
    renewing.keep_alive(sandbox, 3)
    await until(lambda: count(emulator, sandbox, "last-activity") >= 1)
    assert refusal.hits == 3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "returned 403" in warnings[0]


@pytest.fixture
async def sandbox(service: DaytonaService) -> AsyncSandbox:
    params = CreateSandboxFromSnapshotParams(os_user="root", labels=owner_labels())
    return await create_sandbox(service, params, name="ares-exp-kept-from", timeout_sec=60)


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return ObjectStore(tmp_path / "store")


def names(emulator: Emulator) -> list[str]:
    """Of the snapshots that were made."""
    return [name for name in emulator.service.snapshots if name.startswith(KEPT_PREFIX)]


async def test_snapshot_is_listed_until_it_is_deleted(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox, objects: ObjectStore
) -> None:
    delta = await keep_files(service, sandbox)
    assert dict(delta.entries) == {}
    assert "Daytona stores" in delta.notes[0]
    changes = StoredChanges(get_delta(objects, put_delta(delta, objects)), objects)
    name = snapshot_to_start_from(changes)
    assert [name] == names(emulator)
    assert list(await find_kept(service)) == [name]
    await delete_kept(service, str(name))
    assert await find_kept(service) == {}
    await delete_kept(service, str(name))
    with pytest.raises(SnapshotMismatchError, match="deleted"):
        await make_ready(service, str(name))


async def test_lost_response_creates_one_snapshot(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    lost = emulator.faults.add(Fault("drop_after", "POST", path="/snapshot$"))
    delta = await keep_files(service, sandbox)
    assert lost.hits == 1
    assert [snapshot_to_start_from(StoredChanges(delta, ObjectStore(Path())))] == names(emulator)


async def test_failed_snapshot_is_a_capture_error(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    emulator.faults.add(
        Fault("status", "POST", path="/snapshot$", status=400, body={"message": "No internal registry"})
    )
    with pytest.raises(CaptureError, match="No internal registry"):
        await keep_files(service, sandbox)
    emulator.faults.add(Fault("status", "GET", path="/snapshots/", status=404, body={"message": "no such snapshot"}))
    with pytest.raises(CaptureError, match="was not created, and the service gives no reason"):
        await keep_files(service, sandbox)
    assert names(emulator) == []


async def test_unusable_snapshot_is_a_mismatch(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    name = str(snapshot_to_start_from(StoredChanges(await keep_files(service, sandbox), ObjectStore(Path()))))
    kept = emulator.service.snapshots[name]
    kept.state = "inactive"
    await make_ready(service, name)
    assert kept.state == "active"
    kept.state, kept.error_reason = "error", "the registry lost it"
    with pytest.raises(SnapshotMismatchError, match="the registry lost it"):
        await make_ready(service, name)


async def test_cancelled_capture_leaves_no_snapshot(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    slow = emulator.faults.add(Fault("slow", "GET", path="/snapshots/", seconds=30))
    task = asyncio.create_task(keep_files(service, sandbox))
    await slow.met.wait()
    assert len(names(emulator)) == 1
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert names(emulator) == []


async def test_capture_of_a_lost_sandbox_fails(service: DaytonaService, sandbox: AsyncSandbox) -> None:
    await service.client.delete(sandbox, wait=True)
    with pytest.raises(ContainerDiedError):
        await keep_files(service, sandbox)


def test_foreign_snapshot_is_rejected(objects: ObjectStore) -> None:
    assert snapshot_to_start_from(None) is None
    for name in ("", "daytona-small", f"{KEPT_PREFIX}a/b"):
        with pytest.raises(SnapshotMismatchError):
            snapshot_to_start_from(StoredChanges(Delta(f"daytona:kept={name}", {}), objects))


async def test_clean_removes_snapshots_on_request(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    await keep_files(service, sandbox)
    await sandbox.create_snapshot("mine")  # a user's
    found = await asyncio.to_thread(find_all, snapshots=False)
    assert [one.kind for one in found] == ["sandbox"]
    found = await asyncio.to_thread(find_all, snapshots=True)
    kept = [one for one in found if one.kind == "snapshot"]
    assert [one.name for one in kept] == names(emulator)
    assert [one.created is not None and one.is_stale for one in kept] == [True]
    emulator.faults.add(Fault("status", "DELETE", path="/snapshots/", status=403))
    assert "403" in await asyncio.to_thread(kept[0].remove)
    assert await asyncio.to_thread(kept[0].remove) == ""
    assert names(emulator) == []
