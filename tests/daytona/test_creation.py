"""One sandbox for each that is asked for, whatever becomes of the answer; and none where it fails."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams

from ares_exp.containers.daytona import creation
from ares_exp.containers.daytona.creation import create_sandbox, delete_sandbox
from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.errors import (
    ContainerAuthorizationError,
    ContainerDiedError,
    ContainerQuotaError,
    ContainerServiceError,
    ContainerServiceUnavailableError,
    ContainerStartError,
    EnvironmentStartTimeoutError,
)
from tests.daytona.conftest import until
from tests.daytona.emulator import Emulator, Fault

pytestmark = [pytest.mark.local, pytest.mark.once]

SandboxRequest = CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams
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


async def test_create_gives_a_running_sandbox(emulator: Emulator, service: DaytonaService) -> None:
    sandbox = await create_sandbox(service, params(), name=NAME, timeout_sec=60)
    assert (sandbox.name, sandbox.labels["a"]) == (NAME, "b")
    assert (await sandbox.process.exec("echo here")).result == "here\n"
    assert len(asked(emulator)) == 1
    await delete_sandbox(service, NAME)
    await nothing_is_left(emulator, service)


@pytest.mark.parametrize(
    "fault",
    [
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
    ],
    ids=lambda fault: f"{fault.kind}-{fault.method}-{fault.status}",
)
async def test_exactly_one_whatever_becomes_of_the_answer(
    emulator: Emulator, service: DaytonaService, fault: Fault
) -> None:
    emulator.faults.add(fault)
    sandbox = await create_sandbox(service, params(), name=NAME, timeout_sec=60)
    assert fault.hits or fault.method == "GET"  # it may run before it is looked at
    assert [one.id for one in emulator.sandboxes.values()] == [sandbox.id]
    assert (await sandbox.process.exec("echo here")).result == "here\n"
    await delete_sandbox(service, NAME)
    await nothing_is_left(emulator, service)


async def test_an_existing_sandbox_is_adopted(emulator: Emulator, service: DaytonaService) -> None:
    """A request whose answer got lost on its way through a proxy that then sent it again."""
    there = await service.client.create(params().model_copy(update={"name": NAME}))
    sandbox = await create_sandbox(service, params(), name=NAME, timeout_sec=60)
    assert (sandbox.id, len(emulator.sandboxes)) == (there.id, 1)
    assert asked(emulator) == [200, 409]


async def test_a_quota(emulator: Emulator, service: DaytonaService) -> None:
    emulator.service.max_count = 0
    with pytest.raises(ContainerQuotaError, match=f"The sandbox {NAME}: .*Total CPU limit exceeded.*concurrency="):
        await create_sandbox(service, params(), name=NAME, timeout_sec=60)
    assert asked(emulator) == [400]
    await nothing_is_left(emulator, service)


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (CreateSandboxFromSnapshotParams(snapshot="nowhere"), ContainerServiceError, "Snapshot nowhere not found"),
        (
            CreateSandboxFromImageParams(image="registry.invalid/nothing:1"),
            ContainerStartError,
            r"its image could not be built: failed to pull registry\.invalid",
        ),
    ],
    ids=["snapshot", "image"],
)
async def test_a_sandbox_from_nothing(
    emulator: Emulator, service: DaytonaService, wanted: SandboxRequest, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await create_sandbox(service, wanted, name=NAME, timeout_sec=60)
    assert len(asked(emulator)) == 1
    await nothing_is_left(emulator, service)


async def test_an_unavailable_service_leaves_no_sandbox(
    emulator: Emulator, service: DaytonaService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(creation, "APPEARS_WITHIN_SEC", 0.2)
    emulator.faults.add(Fault("status", "POST", CREATION, status=503, times=None))
    with pytest.raises((ContainerServiceUnavailableError, EnvironmentStartTimeoutError)):
        await create_sandbox(service, params(), name=NAME, timeout_sec=0.5)
    await nothing_is_left(emulator, service)


async def test_too_slow(emulator: Emulator, service: DaytonaService) -> None:
    """It is given up before the service even starts, and then found and removed."""
    emulator.faults.add(Fault("slow", "POST", CREATION, seconds=1))
    with pytest.raises(EnvironmentStartTimeoutError, match=f"The sandbox {NAME} did not start within 0"):
        await create_sandbox(service, params(), name=NAME, timeout_sec=0.2)
    assert asked(emulator) == [200]
    await nothing_is_left(emulator, service)


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("slow", "POST", CREATION, seconds=0.0)],
        [Fault("slow", "POST", CREATION, seconds=0.5)],
        [Fault("drop_after", "POST", CREATION), Fault("slow", "GET", NAME, seconds=1)],
    ],
    ids=["at once", "later", "answer lost"],
)
async def test_a_cancelled_creation_leaves_nothing(
    emulator: Emulator, service: DaytonaService, faults: list[Fault]
) -> None:
    for fault in faults:
        emulator.faults.add(fault)
    making = asyncio.ensure_future(create_sandbox(service, params(), name=NAME, timeout_sec=60))
    await until(lambda: emulator.sandboxes if len(faults) == 2 else emulator.requests)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
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


@pytest.mark.parametrize(
    "fault",
    [
        Fault("status", "DELETE", status=409, times=2, body={"message": "Sandbox state change in progress"}),
        Fault("lost", "DELETE"),
    ],
    ids=["its state changes", "it goes meanwhile"],
)
async def test_a_changing_sandbox_is_removed(emulator: Emulator, service: DaytonaService, fault: Fault) -> None:
    await delete_sandbox(service, NAME)  # there is none yet
    await create_sandbox(service, params(), name=NAME, timeout_sec=60)
    emulator.faults.add(fault)
    await delete_sandbox(service, NAME)
    assert fault.times == 0
    await nothing_is_left(emulator, service)


async def test_a_rejected_removal_is_an_authorization_error(emulator: Emulator, service: DaytonaService) -> None:
    await create_sandbox(service, params(), name=NAME, timeout_sec=60)
    emulator.faults.add(Fault("status", "DELETE", status=403))
    with pytest.raises(ContainerAuthorizationError):
        await delete_sandbox(service, NAME)


async def test_a_closed_connection_ends_creations(emulator: Emulator, service: DaytonaService) -> None:
    emulator.faults.add(Fault("slow", "POST", CREATION, seconds=0.5))
    making = asyncio.ensure_future(create_sandbox(service, params(), name=NAME, timeout_sec=60))
    await until(lambda: emulator.requests)
    await service.close()
    with contextlib.suppress(ContainerServiceError, ContainerDiedError):
        await making
    assert making.done()
    assert not making.cancelled()
