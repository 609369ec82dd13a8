"""Blocking calls of many episodes: gathered, bounded, each caller hearing of its own item."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from ares_exp.records.gathered_calls import GatheredCalls


async def test_what_comes_while_all_threads_are_busy_is_taken_together() -> None:
    taken: list[list[int]] = []
    may_end, has_begun = threading.Event(), threading.Semaphore(0)

    def take(items: Sequence[int]) -> None:
        taken.append(list(items))
        has_begun.release()
        assert may_end.wait(30)

    calls = GatheredCalls(take, at_once=2)
    waiting = [calls.put(0)]
    await asyncio.to_thread(has_begun.acquire)
    waiting.append(calls.put(1))
    await asyncio.to_thread(has_begun.acquire)
    for number in range(2, 9):
        waiting.append(calls.put(number))
        await asyncio.sleep(0)
    assert taken == [[0], [1]]
    may_end.set()
    await asyncio.gather(*waiting)
    assert taken == [[0], [1], [*range(2, 9)]]


async def test_nobody_hears_that_an_item_is_taken_before_it_is() -> None:
    written: set[int] = set()

    async def end(number: int) -> None:
        await asyncio.shield(calls.put(number))
        assert number in written

    calls = GatheredCalls(written.update, at_once=3)
    await asyncio.gather(*(end(number) for number in range(200)))
    assert len(written) == 200


async def test_one_who_is_cancelled_takes_the_item_of_no_other_away() -> None:
    taken: list[int] = []

    async def end(number: int) -> None:
        await asyncio.shield(calls.put(number))

    calls = GatheredCalls(taken.extend)
    first, second = asyncio.create_task(end(1)), asyncio.create_task(end(2))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert sorted(taken) == [1, 2]


def test_event_loops_do_not_wait_for_each_other() -> None:
    taken: list[int] = []
    calls = GatheredCalls(taken.extend)

    async def put(number: int) -> None:
        await calls.put(number)

    for number in range(3):
        asyncio.run(put(number))
    assert taken == [0, 1, 2]
