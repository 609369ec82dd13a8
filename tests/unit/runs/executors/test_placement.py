"""Which host an environment is placed in."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from ares_exp.errors import PreflightError
from ares_exp.runs.executors.placement import Placement, beside


def of(**slots: int) -> Placement[str]:
    placement: Placement[str] = Placement()
    for name, count in slots.items():
        placement.add(name, name, count)
    return placement


async def test_attempts_of_a_task_share_a_node() -> None:
    placement = of(a=8, b=8, c=8)
    async with AsyncExitStack() as stack:
        for number in range(12):
            await stack.enter_async_context(placement.slot(f"other-{number}"))
        found = Counter([await stack.enter_async_context(placement.slot("task")) for _ in range(2)])
    assert len(found) == 1
    again = of(c=8, a=8, b=8)
    async with again.slot("task") as one, placement.slot("task") as other:
        assert one == other, "in whatever order the nodes came"


async def test_slots_are_spread_evenly_over_nodes() -> None:
    placement = of(a=20, b=20, c=20)
    async with AsyncExitStack() as stack:
        found = Counter([await stack.enter_async_context(placement.slot("task")) for _ in range(30)])
        assert max(found.values()) <= 14
        rest = Counter([await stack.enter_async_context(placement.slot("task")) for _ in range(30)])
        assert found + rest == Counter(a=20, b=20, c=20), "all slots are used"


async def test_a_placement_waits_for_a_host_and_slot() -> None:
    placement: Placement[str] = Placement()

    async def execute() -> str:
        async with placement.slot("task") as host:
            return host

    waiting = [asyncio.create_task(execute()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(one.done() for one in waiting)
    placement.add("a", "a", 1)
    assert await asyncio.gather(*waiting) == ["a"] * 3
    cancelled = asyncio.create_task(execute())
    cancelled.cancel()
    await asyncio.wait({cancelled})
    async with placement.slot("task") as host:
        assert host == "a"


async def test_repeated_losses_reduce_the_number_of_neighbours() -> None:
    assert [beside(losses, 64) for losses in range(4)] == [64, 8, 1, 1]
    placement = of(a=64)
    alone = asyncio.Event()

    async def suspect() -> None:
        async with placement.slot("poison", losses=2):
            alone.set()
            await asyncio.sleep(0)
            assert not newcomer.done(), "nobody comes to it"

    async def come() -> None:
        async with placement.slot("other"):
            assert running.done()

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(placement.slot("other"))
        running = asyncio.create_task(suspect())
        await asyncio.sleep(0)
        newcomer = asyncio.create_task(come())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not alone.is_set(), "it waits for an empty host, which is kept for it"
        assert not newcomer.done()
    await asyncio.gather(running, newcomer)


async def test_a_lost_host_gets_no_more_episodes() -> None:
    placement = of(a=1)
    async with placement.slot("task"):
        placement.remove("a")
    assert placement.slots == 0
    placement.give_up(PreflightError("no node"))
    with pytest.raises(PreflightError, match="no node"):
        async with placement.slot("task"):
            pass
