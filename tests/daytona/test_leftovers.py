"""What runs that were killed left at the service is found and removed; what lives, or is of others, is not."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from daytona import CreateSandboxFromSnapshotParams

from ares_exp.containers.daytona.factory import find, remove_stale
from ares_exp.containers.daytona.service import DaytonaService, create_sandbox
from ares_exp.containers.ownership import HOST, owner_labels
from tests.daytona.emulator import Emulator, Fault
from tests.leaks import until
from tests.warm_start import WITH_DAYTONA, warm_command

pytestmark = pytest.mark.local

SAY_LABELS = """
import json, time
from ares_exp.containers.ownership import owner_labels
print(json.dumps(owner_labels()), flush=True)
time.sleep(600)
"""
DEAD, LIVING, FOREIGN, PLAIN = "ares-exp-dead", "ares-exp-living", "ares-exp-foreign", "ares-exp-of-nobody"


async def labels_of_the_dead() -> dict[str, str]:
    """Of a process that was killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SAY_LABELS, stdout=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    labels: dict[str, str] = json.loads(await process.stdout.readline())
    process.kill()
    await process.wait()
    return labels


@pytest.fixture
async def dead(service: DaytonaService) -> dict[str, str]:
    """Labels of a dead run, and sandboxes of this run, of another machine and without labels."""
    dead = await labels_of_the_dead()
    for name, labels in (
        (DEAD, dead),
        (LIVING, owner_labels()),
        (FOREIGN, dead | {HOST: "another-machine"}),
        (PLAIN, {"mine": "yes"}),
    ):
        await create_sandbox(service, CreateSandboxFromSnapshotParams(labels=labels), name=name, timeout_sec=60)
    return dead


async def names(emulator: Emulator) -> set[str]:
    """Waits until removed sandboxes are gone, then returns the rest."""
    await until(lambda: not any(one.state == "destroying" for one in emulator.sandboxes.values()))
    return {one.name for one in emulator.sandboxes.values()}


async def test_find_lists_sandboxes_with_owner_and_age(service: DaytonaService, dead: dict[str, str]) -> None:
    found = {leftover.name: leftover for leftover in await find(service)}
    assert {name: leftover.is_stale for name, leftover in found.items()} == {DEAD: True, LIVING: False, FOREIGN: False}
    assert found[DEAD].whose == f"process {dead['ares_exp.pid']} on {dead[HOST]}"
    assert found[DEAD].kind == "sandbox"
    assert found[DEAD].created is not None
    assert {leftover.name for leftover in await find(service, of_this_machine=True)} == {DEAD, LIVING}


async def test_stale_sandboxes_are_removed_when_run_starts(
    emulator: Emulator, service: DaytonaService, dead: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    refusal = emulator.faults.add(Fault("status", "DELETE", status=403))
    await remove_stale(service)
    assert refusal.hits == 1
    assert f"The sandbox {DEAD}, whose owner (process {dead['ares_exp.pid']} on" in caplog.text
    await remove_stale(service)
    assert await names(emulator) == {LIVING, FOREIGN, PLAIN}


async def clean(directory: Path, *arguments: str, **env: str) -> tuple[int | None, list[str], str]:
    """Runs the command; returns its exit code, what it says of sandboxes and of Daytona, and its stderr."""
    process = await asyncio.create_subprocess_exec(
        *(*warm_command("ares_exp", WITH_DAYTONA), "clean", *arguments),
        env={**os.environ, "TMPDIR": str(directory), "DOCKER_HOST": "unix:///no/such.sock", **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    lines = [
        line
        for line in output.decode().splitlines()
        if any(word in line for word in ("sandbox", "snapshot", "Daytona"))
    ]
    return process.returncode, lines, errors.decode()


@pytest.mark.once
async def test_command_removes_stale_sandboxes(emulator: Emulator, dead: dict[str, str], tmp_path: Path) -> None:
    line = f"sandbox        {DEAD}  of process {dead['ares_exp.pid']} on {dead[HOST]}, made "
    code, said, errors = await clean(tmp_path, "--dry-run")
    assert (code, len(said), errors) == (0, 1, "")
    assert said[0].startswith(line)
    assert await names(emulator) == {DEAD, LIVING, FOREIGN, PLAIN}
    code, said, errors = await clean(tmp_path)
    assert (code, len(said), errors) == (0, 1, "")
    assert await names(emulator) == {LIVING, FOREIGN, PLAIN}
    assert emulator.api_key not in said[0]


async def test_command_reports_an_unavailable_service(emulator: Emulator, tmp_path: Path) -> None:
    emulator.faults.add(Fault("status", status=403, times=None))
    code, said, errors = await clean(tmp_path)
    assert (code, errors) == (1, "")
    assert said[0].startswith("The resources of the Daytona service could not be listed. The list of sandboxes: ")


async def test_command_needs_credentials(tmp_path: Path) -> None:
    half = {"DAYTONA_API_KEY": "", "DAYTONA_JWT_TOKEN": "x", "DAYTONA_ORGANIZATION_ID": ""}
    code, said, errors = await clean(tmp_path, **half)
    assert (code, errors) == (1, "")
    assert "DAYTONA_JWT_TOKEN is set without DAYTONA_ORGANIZATION_ID" in said[0]
    assert await clean(tmp_path, **half | {"DAYTONA_JWT_TOKEN": ""}) == (0, [], "")
