"""Waits for request slots, and how they are reported."""

from __future__ import annotations

import asyncio

import pytest

from ares_exp.errors import RateLimitError
from ares_exp.llms.request import LLMRequest
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.waiting import MAX_PAUSES, RequestSlots
from tests.loopback_endpoint import LoopbackEndpoint, error
from tests.unit.policies.conftest import Make

HI = LLMRequest([{"role": "user", "content": "hi"}])


class Waits(list[float]):
    """The reported waits of an episode; `told` is set after a report."""

    def __init__(self) -> None:
        self.told = asyncio.Event()

    def __call__(self, seconds: float) -> None:
        self.append(seconds)
        self.told.set()

    @property
    def spec(self) -> EpisodeSpec:
        return EpisodeSpec("t", on_wait=self)


async def test_a_wait_is_reported_before_it_passes(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(error(429, headers={"Retry-After": "0.2"}), error(503))
    asked_when_told: list[int] = []
    waits: list[float] = []

    def on_wait(seconds: float) -> None:
        waits.append(seconds)
        asked_when_told.append(len(endpoint.requests))

    assert (await make().for_episode(EpisodeSpec("t", on_wait=on_wait))(HI)).text == "hello"
    assert asked_when_told == [1, 2]
    assert 0.2 <= waits[0] <= 0.205
    assert 0.005 <= waits[1] <= 0.02


async def test_a_request_without_wait_reports_nothing(make: Make) -> None:
    waits = Waits()
    await make().for_episode(waits.spec)(HI)
    assert waits == []


async def test_a_waiting_retry_frees_its_slot(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(error(503))
    policy, first, second = make(max_concurrency=1, retry_base_sec=50.0), Waits(), Waits()
    waiting = asyncio.create_task(policy.for_episode(first.spec)(HI))
    async with asyncio.timeout(10):
        await first.told.wait()
        assert (await policy.for_episode(second.spec)(HI)).text == "hello"
    assert second == []
    assert not waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_a_retry_after_holds_back_all(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(error(429, headers={"Retry-After": "50"}))
    policy, first, second = make(), Waits(), Waits()
    asking = [asyncio.create_task(policy.for_episode(first.spec)(HI))]
    async with asyncio.timeout(10):
        await first.told.wait()
        asking.append(asyncio.create_task(policy.for_episode(second.spec)(HI)))
        await second.told.wait()
    assert len(endpoint.requests) == 1, "it asked, although the endpoint had said to wait"
    assert 0 < second[0] <= first[0]
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


async def test_a_rejected_wait_does_not_pause_others(endpoint: LoopbackEndpoint, make: Make) -> None:
    endpoint.then(error(429, headers={"Retry-After": "3600"}))
    policy, waits = make(), Waits()
    with pytest.raises(RateLimitError):
        await policy(HI)
    async with asyncio.timeout(10):
        await policy.for_episode(waits.spec)(HI)
    assert waits == []


async def test_a_long_wait_for_a_slot_is_reported() -> None:
    slots, waits = RequestSlots(1), Waits()

    async def wait() -> None:
        async with slots.one(waits):
            pass

    async with asyncio.timeout(20):
        async with slots.one(waits):
            waiting = asyncio.create_task(wait())
            await waits.told.wait()
            assert not waiting.done()
        await waiting


async def test_pauses_are_bounded() -> None:
    slots, waits = RequestSlots(1, sleep=lambda seconds: asyncio.sleep(0)), Waits()
    slots.pause(50.0)
    async with asyncio.timeout(20), slots.one(waits):
        pass
    assert len(waits) == MAX_PAUSES


async def test_a_cancelled_waiter_frees_its_slot() -> None:
    slots, waits = RequestSlots(1), Waits()

    async def enter() -> None:
        async with slots.one(waits):
            pass

    slots.pause(50.0)
    in_pause = asyncio.create_task(enter())
    async with asyncio.timeout(10):
        await waits.told.wait()
        in_pause.cancel()
        await asyncio.wait({in_pause})
        slots = RequestSlots(1)
        async with slots.one(waits):
            in_queue = asyncio.create_task(enter())
            await asyncio.sleep(0)
            in_queue.cancel()
            await asyncio.wait({in_queue})
        async with slots.one(waits):
            pass
