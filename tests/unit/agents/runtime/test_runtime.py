import asyncio
import gc
import logging
import random
import time
import uuid

import pytest

from ares_exp.agents.runtime.agent_runtime import AgentRuntime
from ares_exp.agents.runtime.journal import DoneEntry, SeedEntry
from ares_exp.errors import ContainerError, EpisodeStateError
from tests.unit.agents.runtime.programs import Program, World, again, new_journal

GRACE_SEC = 20.0
both_loops = pytest.mark.parametrize("deterministic", [True, False], ids=["agent loop", "whole event loop"])


def new_world(deterministic: bool = True, **options: bool) -> World:
    return World(new_journal() if deterministic else None, **options)


def start(world: World, agent: Program) -> None:
    world.runtime.start(lambda: agent(world))


def nothing_is_left() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


@both_loops
async def test_call_returns_or_raises_its_outcome(deterministic: bool) -> None:
    async def agent(w: World) -> None:
        w.log.append((await w.exec("works"))[:5])
        try:
            await w.exec("fails", error=ContainerError("down"))
        except ContainerError as error:
            w.log.append(str(error))

    world = await new_world(deterministic).execute(agent)
    assert world.log == ["works", "down"]
    assert world.performed == ["works", "fails"]
    assert nothing_is_left()


@both_loops
async def test_abandoned_calls_are_cancelled(deterministic: bool) -> None:
    ended: list[str] = []

    async def agent(w: World) -> None:
        for name in ("cancelled", "late"):
            try:
                async with asyncio.timeout(0.01):
                    await w.never(name, ended)
            except TimeoutError:
                w.log.append(name)
        _, pending = await asyncio.wait({asyncio.create_task(w.never("other", ended))}, timeout=0.001)
        pending.pop().cancel()
        await w.exec("after", turns=3)
        w.log.append(list(ended))

    world = await new_world(deterministic).execute(agent)
    assert world.log == ["cancelled", "late", ["cancelled", "late", "other"]]
    assert world.runtime.open_calls == []


@both_loops
async def test_response_to_an_abandoned_call_is_dropped(deterministic: bool) -> None:
    async def agent(w: World) -> None:
        try:
            async with asyncio.timeout(0.001):
                await w.ask("given up")
        except TimeoutError:
            w.log.append(await w.ask("again"))

    world = new_world(deterministic, responses=False)
    start(world, agent)
    await world.until(lambda: len(world.asked) == 2)
    first, second = world.asked
    assert not first.is_open
    for call in (first, second):
        world.runtime.deliver(call, world.response_to(call))
    await world.until(lambda: world.runtime.has_ended)
    assert world.log == ["AGAIN"]


@both_loops
async def test_cancel_ends_all_calls(deterministic: bool) -> None:
    ended: list[str] = []

    async def agent(w: World) -> None:
        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(w.never(name, ended))
            group.create_task(asyncio.sleep(3600))
            group.create_task(w.ask("?"))

    world = new_world(deterministic, responses=False)
    start(world, agent)
    await world.until(lambda: world.asked)
    await asyncio.sleep(0)
    started = time.monotonic()
    await world.runtime.cancel(GRACE_SEC)
    assert time.monotonic() - started < GRACE_SEC
    assert sorted(ended) == ["a", "b", "c"]
    assert world.runtime.task.cancelled()
    assert nothing_is_left()


@both_loops
async def test_agent_ignoring_cancellation_loses_its_calls(deterministic: bool) -> None:
    async def agent(w: World) -> None:
        while True:
            try:
                await w.never("stubborn")
            except asyncio.CancelledError:
                continue
            except EpisodeStateError as error:
                w.log.append(str(error))
                return

    world = new_world(deterministic)
    start(world, agent)
    await asyncio.sleep(0.01)
    await world.runtime.cancel(GRACE_SEC)
    assert world.runtime.has_ended
    assert world.log == ["The agent's part of the episode has ended, so no more exec calls are allowed."]
    assert nothing_is_left()


async def test_endless_agent_is_abandoned_after_the_grace_period() -> None:
    async def agent(w: World) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(3600)

    world = new_world()
    start(world, agent)
    await world.runtime.cancel(0.05)
    assert not world.runtime.has_ended
    assert nothing_is_left()
    world.runtime.task.cancel()
    await world.runtime.cancel(GRACE_SEC)
    assert world.runtime.has_ended


async def test_held_outcomes_are_delivered_in_order() -> None:
    async def agent(w: World) -> None:
        async def one(name: str) -> None:
            w.log.append((await w.exec(name, turns=1))[:1])

        await asyncio.gather(one("a"), one("b"), asyncio.sleep(0.001))

    world = new_world()
    start(world, agent)
    world.runtime.hold()
    await world.until(lambda: len(world.performed) == 2)
    await asyncio.sleep(0.02)
    journal = world.runtime.journal
    assert (world.log, [entry for entry in journal.entries if isinstance(entry, DoneEntry)]) == ([], [])
    world.runtime.release()
    await world.until(lambda: world.runtime.has_ended)
    assert sorted(world.log) == ["a", "b"]
    assert (await again(agent, journal)).log == world.log


async def test_simultaneous_responses_are_delivered_in_call_order() -> None:
    async def agent(w: World) -> None:
        w.log.append(await asyncio.gather(*(w.ask(name) for name in "abc")))

    world = new_world(responses=False)
    start(world, agent)
    assert [call.arguments.messages[0]["content"] for call in world.asked] == ["a", "b", "c"]
    for call in reversed(world.asked):
        world.runtime.deliver(call, world.response_to(call))
    assert world.log == [["A", "B", "C"]]


async def test_agent_clock_follows_the_last_outcome() -> None:
    async def agent(w: World) -> None:
        w.log.append([time.monotonic(), asyncio.get_running_loop().time()])
        await asyncio.sleep(0.01)
        w.log.append([time.monotonic(), asyncio.get_running_loop().time()])

    world = await new_world().execute(agent)
    assert world.log[0] == [0.0, 0.0]
    assert world.log[1][0] == world.log[1][1] >= 0.01


async def test_new_seed_gives_new_reproducible_draws() -> None:
    async def agent(w: World) -> None:
        for _ in range(3):
            w.log.append([random.random(), uuid.uuid4().hex])
            await w.ask("next")

    first, other = [new_world(responses=False) for _ in range(2)]
    for world in (first, other):
        start(world, agent)
        world.runtime.deliver(world.asked[0], world.response_to(world.asked[0]))
    other.runtime.reseed(99)
    for world in (first, other):
        for place in (1, 2):
            world.runtime.deliver(world.asked[place], world.response_to(world.asked[place]))
    assert first.log[:2] == other.log[:2]
    assert first.log[2] != other.log[2]
    assert SeedEntry(99) in other.runtime.journal.entries
    assert (await again(agent, other.runtime.journal)).log == other.log


async def test_unawaited_exceptions_are_reported_during_the_phase(caplog: pytest.LogCaptureFixture) -> None:
    async def agent(w: World) -> None:
        async def fails(text: str) -> None:
            raise ValueError(text)

        failing = [asyncio.create_task(fails("unheard"))]
        await w.exec("meanwhile")
        failing.clear()
        failing.append(asyncio.create_task(fails("too late")))
        await w.ask("?")
        failing.clear()

    with caplog.at_level(logging.ERROR, "asyncio"):
        world = new_world(responses=False)
        start(world, agent)
        await world.until(lambda: world.asked)
        gc.collect()  # a task and its exception may know each other
        assert "unheard" in caplog.text
        await world.runtime.cancel(GRACE_SEC)
        gc.collect()
    assert "too late" not in caplog.text


async def test_foreign_future_cannot_be_awaited() -> None:
    foreign = asyncio.get_running_loop().create_future()

    async def agent(w: World) -> None:
        await foreign

    with pytest.raises(RuntimeError, match="attached to a different loop"):
        await new_world().execute(agent)


async def test_hold_also_pauses_a_nondeterministic_agent() -> None:
    touched = asyncio.Event()

    async def perform() -> None:
        touched.set()

    async def agent() -> None:
        await asyncio.sleep(0.01)
        await runtime.call("exec", {"command": "ls"}, perform)

    runtime = AgentRuntime(None, on_llm=lambda call: None, on_change=lambda: None)
    runtime.start(agent)
    runtime.hold()
    await asyncio.sleep(0.1)
    assert runtime.in_flight
    assert not touched.is_set()
    runtime.release()
    await asyncio.wait_for(touched.wait(), 30)
    await runtime.cancel(5)
