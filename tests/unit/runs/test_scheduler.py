"""The scheduler with episodes that are a line of code: who gets a slot, and how it comes to an end."""

import asyncio

import pytest

from ares_exp.runs import scheduler as module
from ares_exp.runs.scheduler import PlannedEpisode, Retry, Scheduler, Slot, plan_episodes

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
