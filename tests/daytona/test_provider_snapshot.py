"""Snapshots that the service itself makes of a sandbox, over the real SDK."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from daytona import AsyncSandbox, CreateSandboxFromSnapshotParams

from ares_exp.containers.daytona.creation import create_sandbox
from ares_exp.containers.daytona.leftovers import find_all
from ares_exp.containers.daytona.provider_snapshot import (
    KEPT_PREFIX,
    delete_kept,
    find_kept,
    keep_files,
    make_ready,
    snapshot_to_start_from,
)
from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.containers.filesystem.delta import Delta, StoredChanges
from ares_exp.containers.filesystem.delta_encoding import get_delta, put_delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.ownership import owner_labels
from ares_exp.errors import CaptureError, ContainerDiedError, SnapshotMismatchError
from tests.daytona.conftest import said
from tests.daytona.emulator import Emulator, Fault

pytestmark = [pytest.mark.local, pytest.mark.once]


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


async def test_a_snapshot_restores_files_in_another_sandbox(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox, objects: ObjectStore
) -> None:
    await said(sandbox, "echo mine >/file")
    delta = await keep_files(service, sandbox)
    assert dict(delta.entries) == {}
    assert "Daytona keeps" in delta.notes[0]
    changes = StoredChanges(get_delta(objects, put_delta(delta, objects)), objects)
    name = snapshot_to_start_from(changes)
    assert [name] == names(emulator)
    await make_ready(service, str(name))
    params = CreateSandboxFromSnapshotParams(snapshot=name, os_user="root")
    again = await create_sandbox(service, params, name="ares-exp-kept-again", timeout_sec=60)
    assert await said(again, "cat /file") == "mine\n"
    assert await said(sandbox, "cat /file") == "mine\n"
    assert list(await find_kept(service)) == [name]
    await delete_kept(service, str(name))
    assert await find_kept(service) == {}
    await delete_kept(service, str(name))
    with pytest.raises(SnapshotMismatchError, match="deleted"):
        await make_ready(service, str(name))


async def test_a_lost_response_keeps_one_snapshot(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    lost = emulator.faults.add(Fault("drop_after", "POST", path="/snapshot$"))
    delta = await keep_files(service, sandbox)
    assert lost.hits == 1
    assert [snapshot_to_start_from(StoredChanges(delta, ObjectStore(Path())))] == names(emulator)


async def test_a_failed_snapshot_is_a_capture_error(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    emulator.faults.add(
        Fault("status", "POST", path="/snapshot$", status=400, body={"message": "No internal registry"})
    )
    with pytest.raises(CaptureError, match="No internal registry"):
        await keep_files(service, sandbox)
    emulator.faults.add(Fault("status", "GET", path="/snapshots/", status=404, body={"message": "no such snapshot"}))
    with pytest.raises(CaptureError, match="the service made none"):
        await keep_files(service, sandbox)
    assert names(emulator) == []


async def test_an_unusable_snapshot_is_a_mismatch(
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


async def test_a_cancelled_capture_leaves_no_snapshot(
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


def test_a_foreign_snapshot_is_rejected(objects: ObjectStore) -> None:
    assert snapshot_to_start_from(None) is None
    with pytest.raises(SnapshotMismatchError, match="another backend"):
        snapshot_to_start_from(StoredChanges(Delta("docker:sha256:0", {}), objects))
    for name in ("", "daytona-small", f"{KEPT_PREFIX}a/b"):
        with pytest.raises(SnapshotMismatchError):
            snapshot_to_start_from(StoredChanges(Delta(f"daytona:kept={name}", {}), objects))


async def test_clean_removes_snapshots_on_request(
    emulator: Emulator, service: DaytonaService, sandbox: AsyncSandbox
) -> None:
    await keep_files(service, sandbox)
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
