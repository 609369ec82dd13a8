"""Outages on a clock of the test: who waits, how long, and how it ends."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import UnreachableError
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.records import exit_codes
from ares_exp.runs import scheduler as module
from ares_exp.runs.scheduler import MAX_OUTAGE_SEC, Outages, PlannedEpisode, Scheduler
from tests.closed_port import closed_port
from tests.unit.runs.test_experiment import Ready, execute, experiment, rows
from tests.unit.runs.test_scheduler import planned

ANSWERS = 0.0


class Service:
    """A service, the outages of a run, and a clock that only waits between checks move.

    Attributes:
        away_until: Time from which on the service answers.
        now: The time.
        ran: The tasks that were run.
        ended: Why the run was ended.
    """

    def __init__(self, away_until: float = ANSWERS) -> None:
        self.away_until, self.now = away_until, 0.0
        self.checks: list[float] = []
        self.ran: list[str] = []
        self.ended: list[str] = []
        self.scheduler = Scheduler(2, self.execute)
        self.outages = Outages(self.scheduler, self.end, clock=lambda: self.now, sleep=self.sleep)

    async def check(self) -> None:
        self.checks.append(self.now)
        if self.now < self.away_until:
            raise UnreachableError("The engine does not answer.")

    async def execute(self, one: PlannedEpisode) -> None:
        await self.scheduler.starts(one, self.ready)
        self.ran.append(one.task_name)

    async def ready(self) -> None:
        await self.outages.wait(self.check)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)

    def end(self, why: UnreachableError) -> None:
        self.ended.append(str(why))
        self.scheduler.interrupt()

    async def run(self, count: int) -> None:
        async with asyncio.timeout(30):
            await self.scheduler.run(planned(count))
        self.outages.close()


async def test_outage_pauses_starts_until_the_service_responds(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(away_until=90.0)
    with caplog.at_level(logging.WARNING):
        await service.run(30)
    assert len(service.ran) == 30
    waits = [later - earlier for earlier, later in zip(service.checks, service.checks[1:], strict=False)]
    assert [wait for wait in waits if wait][:6] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert service.now < 105.0
    assert [record.getMessage() for record in caplog.records] == [
        "The engine does not answer. No episode starts until it responds. "
        "The run ends after 5 min 00 s without a response.",
        "New episodes start again after an outage of 1 min 35 s. (The engine does not answer.)",
    ]
    assert not service.scheduler.holds


async def test_lasting_outage_ends_the_run() -> None:
    service = Service(away_until=float("inf"))
    await service.run(3)
    assert service.now == MAX_OUTAGE_SEC
    assert (service.ran, service.ended) == ([], ["The engine does not answer. It did not respond for 5 min 00 s."])
    with pytest.raises(UnreachableError):  # also for who asks later
        await service.outages.wait(service.check)


async def test_order_and_outage_each_end_their_own_pause() -> None:
    service = Service(away_until=5.0)
    service.scheduler.pause()
    assert await service.outages.wait(service.check)
    assert service.scheduler.paused
    service.scheduler.resume()
    assert not service.scheduler.paused
    assert not await service.outages.wait(service.check)


async def test_interrupt_in_an_outage_starts_no_episode() -> None:
    service = Service(away_until=float("inf"))
    asyncio.get_running_loop().call_later(0, service.scheduler.interrupt)
    await service.run(3)
    assert (service.ran, service.ended) == ([], [])


async def test_broken_check_causes_no_pause() -> None:
    async def check() -> None:
        raise RuntimeError("a bug")

    assert not await Service().outages.wait(check)


class Gone(Ready):
    """A container factory whose engine is gone."""

    async def check_reachable(self) -> None:
        raise UnreachableError("The engine does not answer.")


@pytest.mark.parametrize("lost", ["engine", "endpoint"])
async def test_run_ends_when_an_outage_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    monkeypatch.setattr(module, "MAX_OUTAGE_SEC", 0.3)
    with closed_port() as port:
        policy = OpenAIPolicy(model="m", base_url=f"http://127.0.0.1:{port}/v1", api_key_env=None)
        parts: dict[str, Any] = {"container_factory": Gone()} if lost == "engine" else {"policy": policy}
        monkeypatch.setattr(OpenAIPolicy, "preflight", Ready.preflight)
        summary = await execute(experiment(tmp_path, count=3, **parts), tmp_path)
    assert (summary.exit_code, summary.interrupted) == (exit_codes.INCOMPLETE, False)
    assert str(summary.ended_by).endswith("It did not respond for 0.3 s.")
    assert [row["outcome"] for row in rows(tmp_path)] == (["cancelled"] if lost == "endpoint" else [])
