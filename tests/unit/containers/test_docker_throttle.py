"""How many slow calls run at a time, and that quick ones do not wait for them."""

from __future__ import annotations

import asyncio
import threading

from ares_exp.containers.docker.creation import Throttle
from ares_exp.containers.docker.engine import in_thread

SOON_SEC = 20.0


def test_so_many_at_a_time_over_several_event_loops() -> None:
    throttle, lock, running, most, done = Throttle(2), threading.Lock(), 0, 0, 0

    async def hold() -> None:
        nonlocal running, most, done
        async with throttle.slot():
            with lock:
                running += 1
                most = max(most, running)
            await asyncio.sleep(0.005)
            with lock:
                running -= 1
                done += 1

    async def many() -> None:
        await asyncio.gather(*(hold() for _ in range(10)))

    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_SEC)
    assert (most, done) == (2, 30)


async def test_first_come_first_served() -> None:
    throttle, order = Throttle(1), list[int]()

    async def hold(number: int) -> None:
        async with throttle.slot():
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(hold(number) for number in range(5)))
    assert order == [0, 1, 2, 3, 4]


async def test_who_gives_up_takes_no_slot_along() -> None:
    throttle = Throttle(1)

    async def hold(until: asyncio.Event) -> None:
        async with throttle.slot():
            await until.wait()

    never, now = asyncio.Event(), asyncio.Event()
    now.set()
    holder = asyncio.create_task(hold(never))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(hold(now)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # while it waits
    holder.cancel()  # while it holds; the slot is on its way to the next ...
    waiting[1].cancel()  # ... which gives up as well
    await asyncio.wait_for(waiting[2], SOON_SEC)
    await asyncio.wait_for(hold(now), SOON_SEC)


async def test_a_quick_call_does_not_wait_for_slow_ones() -> None:
    go = threading.Event()
    slow = [asyncio.create_task(in_thread(go.wait, pool="starts")) for _ in range(64)]
    try:
        assert await asyncio.wait_for(in_thread(lambda: "answer"), SOON_SEC) == "answer"
        assert await asyncio.wait_for(in_thread(lambda: "gone", pool="removals"), SOON_SEC) == "gone"
    finally:
        go.set()
        await asyncio.gather(*slow)


async def test_cancelling_a_call_waits_for_it_unless_it_may_be_left_alone() -> None:
    go = threading.Event()
    kept, left = (asyncio.create_task(in_thread(go.wait, abandon=abandon)) for abandon in (False, True))
    await asyncio.sleep(0)
    kept.cancel()
    left.cancel()
    done, pending = await asyncio.wait({kept, left}, timeout=SOON_SEC, return_when=asyncio.FIRST_COMPLETED)
    assert (done, pending) == ({left}, {kept})
    go.set()
    await asyncio.wait({kept}, timeout=SOON_SEC)
    assert kept.cancelled()
