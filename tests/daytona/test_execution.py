"""Commands of a sandbox over a connection that breaks, a service that is down, and answers that are none."""

from __future__ import annotations

import asyncio
import hashlib
import resource
from collections.abc import Callable
from typing import Any

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.containers.daytona.execution import execute
from ares_exp.containers.daytona.factory import DaytonaContainerFactory
from ares_exp.containers.daytona.relay_script import MAX_ANSWER_BYTES
from ares_exp.errors import ContainerDiedError, ContainerError, ContainerServiceError
from tests.daytona.emulator import Emulator, Fault

pytestmark = [pytest.mark.local, pytest.mark.once]

EXECUTE = "/process/execute$"
LINES = 20_000
SHA256 = hashlib.sha256("".join(f"{n}\n" for n in range(1, LINES + 1)).encode()).hexdigest()


async def until(condition: Callable[[], object]) -> None:
    """Waits for something in the emulator, which has no event for it."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def commands_are_run_once(box: DaytonaContainer) -> None:
    for number in range(5):
        result = await box.exec(f"echo {number} >>/tmp/said; echo {number}", timeout_sec=60)
        assert (result.output, result.exit_code) == (f"{number}\n", 0)
    large = await box.exec(f"seq 1 {LINES}", timeout_sec=60)
    assert hashlib.sha256(large.output.encode()).hexdigest() == SHA256
    assert (await box.exec("cat /tmp/said; rm /tmp/said", timeout_sec=60)).output == "0\n1\n2\n3\n4\n"


FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "drop"},
    {"kind": "drop_after"},
    {"kind": "half"},
    {"kind": "status", "status": 429, "retry_after": 0},
    {"kind": "status", "status": 502},
    {"kind": "status_after", "status": 502},
    {"kind": "status_after", "status": 500},
    {"kind": "slow", "seconds": 0.3},
)


async def test_nothing_is_lost_or_run_twice(emulator: Emulator, box: DaytonaContainer) -> None:
    for fault in FAULTS:
        faults = [emulator.faults.add(Fault(path=EXECUTE, skip=skip, **fault)) for skip in (0, 2, 5, 6)]
        await commands_are_run_once(box)
        assert all(one.hits for one in faults), fault
        emulator.faults.clear()


async def test_a_service_that_is_down_for_a_while(emulator: Emulator, box: DaytonaContainer) -> None:
    """What runs goes on, and what is asked for meanwhile waits."""
    running = asyncio.create_task(box.exec("echo started; until [ -e /tmp/go ]; do sleep 0.01; done; echo ended"))
    await box.exec("true")
    outages = [emulator.faults.add(Fault("status", path="/toolbox/", status=503, times=None))]
    asked = asyncio.create_task(box.exec("touch /tmp/go; echo asked"))
    await until(lambda: outages[0].hits >= 3)
    emulator.faults.clear()
    outages.append(emulator.faults.add(Fault("drop", path="/toolbox/", times=None)))
    await until(lambda: outages[1].hits >= 3)
    assert not asked.done()
    emulator.faults.clear()
    assert (await asked).output == "asked\n"
    assert (await running).output == "started\nended\n"


@pytest.mark.parametrize("state", ["destroyed", "stopped"])
async def test_a_sandbox_that_is_lost_while_a_command_runs(
    emulator: Emulator, box: DaytonaContainer, state: str
) -> None:
    running = asyncio.create_task(box.exec("sleep 100"))
    await box.exec("true")
    emulator.lose(next(iter(emulator.sandboxes)), state)
    with pytest.raises(ContainerDiedError, match=box.sandbox_name):
        await running
    with pytest.raises(ContainerDiedError, match=box.sandbox_name):
        await box.exec("true")


@pytest.mark.parametrize("state", ["destroyed", "error"])
async def test_a_sandbox_that_is_lost_between_commands(emulator: Emulator, box: DaytonaContainer, state: str) -> None:
    await box.exec("true")
    emulator.lose(next(iter(emulator.sandboxes)), state)
    with pytest.raises(ContainerDiedError, match=box.sandbox_name):
        await box.exec("true", separate_stderr=True)
    with pytest.raises(ContainerDiedError, match=box.sandbox_name):
        await box.exec("true", user="nobody")


async def test_the_proxy_says_of_a_lost_sandbox_that_the_key_is_wrong(
    emulator: Emulator, box: DaytonaContainer
) -> None:
    emulator.lose(next(iter(emulator.sandboxes)))
    emulator.faults.add(Fault("status", path="/toolbox/", status=401, times=None))
    with pytest.raises(ContainerDiedError, match=box.sandbox_name):
        await box.exec("true")


async def test_a_refusal_is_no_death(emulator: Emulator, box: DaytonaContainer) -> None:
    refusal = emulator.faults.add(Fault("status", path="/toolbox/", status=403, times=None))
    with pytest.raises(ContainerError, match="answers 403"):
        await box.exec("true")
    assert refusal.hits
    emulator.faults.clear()
    assert (await box.exec("echo back")).output == "back\n"


MALFORMED = {
    "<html>": "Expected an exit code and an output",
    "[1, 2]": "Expected an exit code and an output",
    '{"exitCode": null, "result": ""}': "Expected an exit code and an output",
    '{"exitCode": 1e999, "result": ""}': "Expected an exit code and an output",
    "[" * 100_000: "Expected an exit code and an output",
    f'{{"exitCode": 0, "result": "{"x" * MAX_ANSWER_BYTES}"}}': "printed more than",
}


async def test_answers_that_are_none(emulator: Emulator, box: DaytonaContainer) -> None:
    for body, said in MALFORMED.items():
        running = asyncio.create_task(box.exec("sleep 100"))
        await box.exec("true")
        emulator.faults.add(Fault("status", path=EXECUTE, status=200, body=body, times=None))
        for asked in (box.exec("true"), running):
            with pytest.raises(ContainerError) as caught:
                await asked
            assert said in str(caught.value)
        emulator.faults.clear()
        assert (await box.exec("echo next")).output == "next\n"


async def test_an_answer_without_end(
    emulator: Emulator, box: DaytonaContainer, factory: DaytonaContainerFactory
) -> None:
    connection = factory._connections.acquire()
    try:
        assert box._sandbox is not None
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        flood = emulator.faults.add(Fault("endless", path=EXECUTE, times=None))
        with pytest.raises(ContainerServiceError, match=f"printed more than {MAX_ANSWER_BYTES} bytes"):
            await execute(connection.service, box._sandbox, "true", 10)
        assert flood.hits
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    finally:
        await factory._connections.release(connection)


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
async def test_what_another_user_started_is_ended(box: DaytonaContainer) -> None:
    late = await box.exec("echo started; (trap '' TERM; sleep 4324) & sleep 4324", user="nobody", timeout_sec=1)
    assert (late.output, late.timed_out) == ("started\n", True)
    left = await box.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 432[4]'", shell="sh -c")
    assert left.output == "0\n"


async def test_many_sandboxes_and_commands_at_once(emulator: Emulator, factory: DaytonaContainerFactory) -> None:
    """Faults of one do not reach the others."""
    for skip in range(0, 100, 7):
        emulator.faults.add(Fault("drop_after", path=EXECUTE, skip=skip))

    async def one(number: int) -> list[str]:
        async with factory(ContainerSpec(f"t{number}", docker_image="debian:12.9")) as box:
            results = await asyncio.gather(*(box.exec(f"echo {number} {n}", timeout_sec=60) for n in range(4)))
        return [result.output for result in results]

    found = await asyncio.gather(*map(one, range(4)))
    assert found == [[f"{number} {n}\n" for n in range(4)] for number in range(4)]
    await until(lambda: not emulator.sandboxes)
