"""Shells of a sandbox on the service's terminals: over slow and broken connections, and past an agent in the way."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.errors import ContainerDiedError
from tests.daytona.emulator import Emulator, Fault
from tests.daytona.emulator.terminals import MAX_QUEUED

pytestmark = [pytest.mark.local, pytest.mark.once]

LINES = 200_000
"""Of more bytes than the service keeps for a client."""

SHA256 = hashlib.sha256("".join(f"{n}\n" for n in range(1, LINES + 1)).encode()).hexdigest()


async def test_output_over_a_slow_connection_is_throttled(emulator: Emulator, box: DaytonaContainer) -> None:
    """The service cuts off a client for whom too much waits."""
    emulator.traffic.message_sec = 0.005
    result = await box.exec(f"seq 1 {LINES}", max_output_bytes=2**22, timeout_sec=200)
    assert hashlib.sha256(result.output.encode()).hexdigest() == SHA256
    assert len(result.output) > 4096 * MAX_QUEUED
    assert emulator.traffic.cut_off == 0
    assert (await box.exec("ls /tmp/.ares_exp-*/ | grep -c '[.]'; true")).output in ("0\n", "1\n", "2\n")


async def test_lost_acknowledgements_are_sent_again(emulator: Emulator, box: DaytonaContainer) -> None:
    for kind in ("drop", "drop_after", "status"):
        emulator.faults.add(Fault(kind, "DELETE", "/files$", status=502))  # type: ignore[arg-type]
    result = await box.exec(f"seq 1 {LINES}", max_output_bytes=2**22, timeout_sec=200)
    assert hashlib.sha256(result.output.encode()).hexdigest() == SHA256


async def test_a_shell_without_acknowledgements_is_lost(emulator: Emulator, box: DaytonaContainer) -> None:
    emulator.faults.add(Fault("status", "DELETE", "/files$", status=403, times=None))
    with pytest.raises(ContainerDiedError, match=r"connection to a shell of the container broke.*answers 403"):
        await box.exec(f"seq 1 {LINES}", timeout_sec=200)
    emulator.faults.clear()
    assert (await box.exec("echo next")).output == "next\n"


async def test_a_broken_connection_is_an_error(emulator: Emulator, box: DaytonaContainer) -> None:
    running = asyncio.create_task(box.exec("touch /tmp/started; sleep 4331"))
    await box.exec("until [ -e /tmp/started ]; do sleep 0.01; done")
    emulator.traffic.cut()
    with pytest.raises(ContainerDiedError, match="connection to a shell of the container broke"):
        await running
    assert (await box.exec("echo next")).output == "next\n"


async def test_a_lost_sandbox_fails_its_commands(emulator: Emulator, box: DaytonaContainer) -> None:
    running = asyncio.create_task(box.exec("touch /tmp/started; sleep 4332"))
    await box.exec("until [ -e /tmp/started ]; do sleep 0.01; done")
    emulator.lose(next(iter(emulator.sandboxes)))
    for asked in (running, box.exec("true")):
        with pytest.raises(ContainerDiedError, match=f"{box.sandbox_name} has ended"):
            await asked


async def test_forged_marks_cannot_read_files(emulator: Emulator, box: DaytonaContainer) -> None:
    """It is root, and may do what it likes in its sandbox; on this side it gets no further."""
    key = 'key=$(sed -n "s/^printf .*n. \\([0-9a-f]*\\)$/\\1/p" /tmp/.ares_exp-*/shell)'
    forged = f"{key}; printf '\\035%s %s\\035' $key"
    await box.exec(f"{forged} 99; echo more")
    result = await box.exec("echo a; touch /passwd")
    assert (result.output, result.exit_code) == ("a\n", 0)
    await box.exec(f"{forged} ../../passwd; echo more")
    assert (await box.exec("ls /passwd; rm -rf /tmp/.ares_exp-*")).output == "/passwd\n"
    assert (await box.exec("echo still", timeout_sec=60)).output == "still\n"


@pytest.mark.root
async def test_users(box: DaytonaContainer) -> None:
    for user, said in {
        "root": "0 0",
        0: "0 0",
        "nobody": "65534 65534",
        65534: "65534 65534",
        "65534:4": "65534 4",
        "4321:1234": "4321 1234",
        4321: "4321 0",
    }.items():
        assert (await box.exec("echo $(id -u) $(id -g)", user=user)).output == f"{said}\n"


@pytest.mark.root
async def test_processes_of_other_users_are_killed(box: DaytonaContainer) -> None:
    late = await box.exec("echo started; (trap '' TERM; sleep 4324) & sleep 4324", user="nobody", timeout_sec=1)
    assert (late.output, late.timed_out) == ("started\n", True)
    left = await box.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 432[4]'", shell="sh -c")
    assert left.output == "0\n"


async def test_many_sandboxes_and_commands_at_once(emulator: Emulator, factory: DaytonaContainerFactory) -> None:
    async def one(number: int) -> list[str]:
        async with factory(ContainerSpec(f"t{number}", docker_image="debian:12.9")) as box:
            results = await asyncio.gather(*(box.exec(f"echo {number} {n}", timeout_sec=60) for n in range(4)))
        return [result.output for result in results]

    found = await asyncio.gather(*map(one, range(4)))
    assert found == [[f"{number} {n}\n" for n in range(4)] for number in range(4)]
