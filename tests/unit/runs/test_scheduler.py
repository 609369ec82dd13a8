"""The scheduler and outages, with episodes that are a line of code: who gets a slot, who waits, and how it ends."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import UnreachableError
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.records import exit_codes
from ares_exp.runs import scheduler as module
from ares_exp.runs.scheduler import MAX_OUTAGE_SEC, Outages, PlannedEpisode, Retry, Scheduler, Slot, plan_episodes
from tests.closed_port import closed_port
from tests.unit.runs.test_experiment import Ready, execute, experiment, rows

LONG_SEC = 1000.0


def planned(count: int) -> list[PlannedEpisode]:
    return plan_episodes([f"task-{number}" for number in range(count)], attempts=1, seed=0)


async def test_run_without_owed_episodes_ends() -> None:
    await Scheduler(3, None).run([])  # type: ignore[arg-type]


async def test_waiting_retry_frees_its_slot() -> None:
    order = []
    others_ran = asyncio.Event()

    async def execute(one: PlannedEpisode) -> Retry | None:
        order.append((one.task_name, one.retry))
        if one.task_name == "task-0" and one.retry == 0:
            return Retry(one.anew(retry=1, seed=1), 0.05)
        if one.task_name == "task-2":
            others_ran.set()
        return None

    scheduler = Scheduler(1, execute)
    async with asyncio.timeout(10):
        await scheduler.run(planned(3))
    assert others_ran.is_set()
    assert order[0] == ("task-0", 0)
    assert sorted(order[1:]) == [("task-0", 1), ("task-1", 0), ("task-2", 0)]
    assert order[1] == ("task-1", 0), "the slot was kept"


@pytest.mark.parametrize("is_first", [True, False])
async def test_first_retry_overtakes_the_queue(is_first: bool) -> None:
    order = []

    async def execute(one: PlannedEpisode) -> Retry | None:
        order.append(one.task_name)
        if one.task_name == "task-0" and one.retry == 0:
            return Retry(one.anew(retry=1, seed=1), 0.0, is_first=is_first)
        if one.task_name == "task-1":  # holds the slot until the retry is due
            for _ in range(5):
                await asyncio.sleep(0)
        return None

    scheduler = Scheduler(1, execute)
    async with asyncio.timeout(30):
        await scheduler.run(planned(4))
    assert order == ["task-0", "task-1", *(["task-0"] if is_first else []), "task-2", "task-3"] + (
        [] if is_first else ["task-0"]
    )


async def test_waiting_episodes_are_queued() -> None:
    seen = []

    async def execute(one: PlannedEpisode) -> Retry | None:
        await scheduler.starts(one)
        seen.append(scheduler.queued)
        return Retry(one.anew(retry=1, seed=1), 0.0) if one.retry == 0 else None

    scheduler = Scheduler(1, execute)
    await scheduler.run(planned(2))
    assert seen == [1, 1, 1, 0]
    assert scheduler.queued == 0


async def test_run_error_cancels_running_episodes() -> None:
    ended = asyncio.Event()

    async def execute(one: PlannedEpisode) -> None:
        if one.task_name == "task-1":
            raise RuntimeError("the run is over")
        try:
            await asyncio.sleep(LONG_SEC)
        finally:
            ended.set()

    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="the run is over"):
            await Scheduler(2, execute).run(planned(3))
        await ended.wait()


async def test_interrupt_cancels_episodes_and_starts_none() -> None:
    started, ended = [], []

    async def execute(one: PlannedEpisode) -> None:
        started.append(one.task_name)
        if len(started) == 2:
            scheduler.interrupt()
        try:
            await asyncio.sleep(LONG_SEC)
        except asyncio.CancelledError:
            ended.append(one.task_name)

    scheduler = Scheduler(2, execute)
    async with asyncio.timeout(10):
        await scheduler.run(planned(5))
    assert started == ended == ["task-0", "task-1"]
    assert scheduler.interrupted


async def test_episode_cancelled_before_start_ends() -> None:
    """Such as a try that waits for room on a node."""
    room, ran = asyncio.Event(), []

    async def execute(one: PlannedEpisode) -> None:
        if one.task_name == "task-0":
            await room.wait()
        ran.append(one.task_name)

    scheduler, dropped = Scheduler(2, execute), []
    scheduler.on_drop = dropped.append
    owed = planned(3)
    asyncio.get_running_loop().call_soon(scheduler.cancel, owed[0].slot)
    async with asyncio.timeout(10):
        await scheduler.run(owed)
    assert sorted(ran) == ["task-1", "task-2"]
    assert dropped == [owed[0].slot]
    assert not scheduler.interrupted


async def test_failed_report_of_a_drop_ends_the_run() -> None:
    async def execute(_: PlannedEpisode) -> None:
        await asyncio.sleep(60)

    def on_drop(_: Slot) -> None:
        raise ValueError("the trainer failed")

    scheduler = Scheduler(2, execute)
    scheduler.on_drop = on_drop
    (owed,) = planned(1)
    asyncio.get_running_loop().call_soon(scheduler.cancel, owed.slot)
    with pytest.raises(ValueError, match="the trainer failed"):
        async with asyncio.timeout(10):
            await scheduler.run([owed])


async def test_interrupt_before_the_start_runs_no_episode() -> None:
    scheduler = Scheduler(2, None)  # type: ignore[arg-type]
    scheduler.interrupt()
    await scheduler.run(planned(2))


async def test_interrupt_does_not_wait_for_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERRUPT_GRACE_SEC", LONG_SEC)
    waits = asyncio.Event()

    async def execute(one: PlannedEpisode) -> Retry | None:
        if one.task_name == "task-0":
            waits.set()
            return Retry(one.anew(retry=1, seed=1), LONG_SEC)
        await waits.wait()
        scheduler.interrupt()
        try:
            await asyncio.sleep(LONG_SEC)
        except asyncio.CancelledError:
            return None  # as the experiment does, which keeps a row of it
        raise AssertionError

    scheduler = Scheduler(2, execute)
    async with asyncio.timeout(10):
        await scheduler.run(planned(2))


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
