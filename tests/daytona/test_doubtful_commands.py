"""Commands while the service fails: none is run twice, and none is said to have ended that has not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ares_exp.containers import command_runner as shell_pool
from ares_exp.containers.daytona.container import DaytonaContainer
from ares_exp.errors import (
    ContainerAuthorizationError,
    ContainerError,
    ContainerRateLimitError,
    ContainerServiceError,
    ContainerServiceUnavailableError,
)
from tests.daytona.emulator import Emulator, Fault

pytestmark = [pytest.mark.local, pytest.mark.once, pytest.mark.nightly]  # by day, `test_nothing_is_lost_or_run_twice`

EXECUTE = "/process/execute$"


@pytest.mark.parametrize("times", [1, None])
@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        ({"status": 401}, ContainerAuthorizationError, "answers 401"),
        ({"status": 429, "retry_after": 3600}, ContainerRateLimitError, "answers 429"),
        ({"status": 200, "body": "<html>"}, ContainerServiceError, "Expected an exit code and an output"),
    ],
    ids=["key", "rate-limit", "no-answer"],
)
async def test_one_whose_output_is_refused_has_no_exit_code(
    emulator: Emulator,
    box: DaytonaContainer,
    answer: dict[str, Any],
    kind: type[ContainerError],
    said: str,
    times: int | None,
) -> None:
    """Also if one request fails, and all goes well again: the command was cut off, and did not end by itself."""
    running = asyncio.create_task(box.exec("echo started >/tmp/started; while :; do echo more; sleep 0.05; done"))
    await box.exec("until [ -e /tmp/started ]; do sleep 0.01; done")
    emulator.faults.add(Fault("status", path=EXECUTE, times=times, **answer))
    with pytest.raises(kind, match=said):
        await asyncio.wait_for(running, 60)
    emulator.faults.clear()
    assert (await box.exec("echo next")).output == "next\n"


@pytest.mark.parametrize("kind", ["status_after", "slow"])
async def test_one_that_starts_late_is_not_started_again(
    emulator: Emulator, box: DaytonaContainer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The service runs what it is asked to, and says so long after a shell that is ready would have started."""
    monkeypatch.setattr(shell_pool, "_START_SEC", 0.1)
    late = emulator.faults.add(Fault(kind, path=EXECUTE, status=504, seconds=1.0, times=None))  # type: ignore[arg-type]
    asyncio.get_running_loop().call_later(2.0, emulator.faults.clear)
    assert (await box.exec("echo x >>/tmp/said; echo y", timeout_sec=60)).output == "y\n"
    assert late.hits
    assert (await box.exec("cat /tmp/said", timeout_sec=60)).output == "x\n"


async def test_a_limit_that_passes_while_the_service_is_away_is_no_limit_of_the_command(
    emulator: Emulator, box: DaytonaContainer
) -> None:
    running = asyncio.create_task(box.exec("sleep 100", timeout_sec=1.5))
    away = emulator.faults.add(Fault("drop", path=EXECUTE, times=None, skip=2))  # what starts the command goes well
    with pytest.raises(ContainerServiceUnavailableError, match="whether it still runs, is not known"):
        await running
    assert away.hits
    emulator.faults.clear()
    assert (await box.exec("echo back", timeout_sec=60)).output == "back\n"
