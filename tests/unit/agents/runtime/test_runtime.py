import asyncio
import gc
import inspect
import logging
import random
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from ares_exp.agents.runtime.agent_runtime import AgentLoop, AgentRuntime
from ares_exp.agents.runtime.journal import CallEntry, DoneEntry, Journal, SeedEntry
from ares_exp.agents.runtime.virtual_clock import VirtualClockAndRandom
from ares_exp.errors import ContainerError, DivergenceError, EpisodeStateError, JournalError, NondeterministicCallError
from ares_exp.llms.request import LLMRequest
from tests.unit.agents.runtime.programs import Program, World, again, new_journal, on_disk

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


class Owner:
    def __init__(self) -> None:
        self.timers: list[asyncio.TimerHandle] = []
        self.reported: list[dict[str, Any]] = []
        self.refused: list[NondeterministicCallError] = []

    def set_timer(self, handle: asyncio.TimerHandle, delay: float) -> None:
        self.timers.append(handle)

    def drop_timer(self, handle: asyncio.TimerHandle) -> None:
        self.timers.remove(handle)

    def run_in_thread(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        raise AssertionError

    def report(self, context: dict[str, Any]) -> None:
        self.reported.append(context)

    def note_refusal(self, error: NondeterministicCallError) -> None:
        self.refused.append(error)


def new_loop() -> tuple[AgentLoop, Owner]:
    owner = Owner()
    return AgentLoop(owner, VirtualClockAndRandom(seed=1, started_at=0.0)), owner  # type: ignore[abstract, arg-type]


async def test_callbacks_run_only_while_pumped() -> None:
    loop, _ = new_loop()
    seen: list[int] = []

    async def work() -> None:
        for number in range(3):
            seen.append(number)
            await asyncio.sleep(0)

    task = loop.create_task(work())
    assert seen == []
    loop.pump()
    assert (seen, task.done()) == ([0, 1, 2], True)


async def test_callbacks_run_in_order() -> None:
    loop, _ = new_loop()
    seen: list[str] = []
    loop.call_soon(seen.append, "a")
    loop.call_soon(lambda: loop.call_soon(seen.append, "c"))
    loop.call_soon(seen.append, "gone").cancel()
    loop.call_soon(seen.append, "b")
    loop.pump()
    assert seen == ["a", "b", "c"]


async def test_agent_loop_is_only_the_running_loop_inside() -> None:
    outer = asyncio.get_running_loop()
    loop, _ = new_loop()
    seen: list[object] = []

    async def work() -> None:
        seen.extend([asyncio.get_running_loop(), loop.is_running(), asyncio.current_task()])

    task = loop.create_task(work())
    loop.pump()
    assert seen == [loop, True, task]
    assert asyncio.get_running_loop() is outer
    assert not loop.is_running()


async def test_pump_hides_and_restores_the_task_outside() -> None:
    outer, outer_task = asyncio.get_running_loop(), asyncio.current_task()
    assert outer_task is not None
    (loop, _), (inner, _) = new_loop(), new_loop()
    seen: dict[str, tuple[object, object]] = {}

    def look(name: str) -> None:
        seen[name] = (asyncio.current_task(), asyncio.current_task(outer))

    async def nested() -> None:
        look("nested")

    async def work() -> None:
        inner_task = inner.create_task(nested())
        inner.pump()
        look("task")
        assert seen["nested"] == (inner_task, None)

    task = loop.create_task(work())
    loop.call_soon(look, "callback")
    loop.pump()
    task.result()
    assert (seen["task"], seen["callback"]) == ((task, None), (None, None))
    assert asyncio.current_task() is outer_task


async def test_pump_from_a_callback_restores_no_task() -> None:
    outer = asyncio.get_running_loop()
    loop, _ = new_loop()
    after = outer.create_future()

    async def work() -> None:
        await asyncio.sleep(0)

    task = loop.create_task(work())
    outer.call_soon(lambda: (loop.pump(), after.set_result(asyncio.current_task())))
    assert await after is None
    assert task.done()


async def test_keyboard_interrupt_passes_and_keeps_the_loop() -> None:
    outer, outer_task = asyncio.get_running_loop(), asyncio.current_task()
    loop, _ = new_loop()
    after: list[int] = []

    async def interrupted() -> None:
        raise KeyboardInterrupt

    task = loop.create_task(interrupted())
    loop.call_soon(after.append, 1)
    with pytest.raises(KeyboardInterrupt):
        loop.pump()
    assert isinstance(task.exception(), KeyboardInterrupt)
    assert (asyncio.get_running_loop(), asyncio.current_task()) == (outer, outer_task)
    loop.pump()
    assert after == [1]


async def test_sys_exit_ends_only_its_task() -> None:
    loop, _ = new_loop()
    seen: list[int] = []

    async def leaves() -> None:
        raise SystemExit(3)

    task = loop.create_task(leaves())
    loop.call_soon(seen.append, 1)
    loop.pump()
    assert seen == [1]
    assert isinstance(task.exception(), SystemExit)


async def test_timers_are_passed_to_the_owner() -> None:
    loop, owner = new_loop()
    seen: list[str] = []
    loop.clock.now = 3.0
    first, second = loop.call_later(2, seen.append, "first"), loop.call_at(4, seen.append, "second")
    assert [handle.when() for handle in owner.timers] == [5.0, 4.0]
    second.cancel()
    assert owner.timers == [first]
    loop.run_soon(first)
    loop.pump()
    assert seen == ["first"]


KEPT = {
    *("call_soon", "call_later", "call_at", "time", "create_future", "create_task", "run_in_executor", "is_running"),
    *("is_closed", "close", "get_debug", "set_debug", "get_task_factory", "call_exception_handler"),
    *("default_exception_handler", "shutdown_asyncgens", "shutdown_default_executor"),
}
REFUSED = sorted(
    name
    for name, value in vars(asyncio.AbstractEventLoop).items()
    if not name.startswith("_") and callable(value) and name not in KEPT
)


def test_sockets_processes_signals_and_threads_are_refused() -> None:
    wanted = {"create_connection", "create_server", "sock_recv", "subprocess_exec", "add_signal_handler", "getaddrinfo"}
    assert wanted | {"call_soon_threadsafe", "run_until_complete", "add_reader"} <= set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
async def test_unsupported_calls_are_refused_by_name(name: str) -> None:
    loop, owner = new_loop()
    raised: list[BaseException] = []

    async def work() -> None:
        try:
            found = getattr(loop, name)(1, 2, three=3)
            assert inspect.isawaitable(found)
            await found
        except NondeterministicCallError as error:
            raised.append(error)

    task = loop.create_task(work())
    loop.pump()
    task.result()
    assert raised == owner.refused
    assert f"`{name}`" in str(raised[0])
    assert "deterministic = False" in str(raised[0])


async def twice(w: World) -> None:
    await asyncio.gather(w.exec("a"), w.exec("b"))
    await w.ask("question")


async def divergence(agent: Program, journal: Journal) -> str:
    with pytest.raises(DivergenceError) as caught:
        await again(agent, journal)
    error = caught.value
    assert f"after {error.step} LLM responses (entry {error.entry} of " in str(error)
    assert error.why in str(error)
    return str(error)


async def recorded(agent: Program = twice) -> Journal:
    journal = (await World(new_journal()).execute(agent)).runtime.journal
    assert journal is not None
    return journal


async def test_concurrent_calls_may_change_their_order() -> None:
    async def reversed_order(w: World) -> None:
        await asyncio.gather(w.exec("b"), w.exec("a"))
        await w.ask("question")

    await again(reversed_order, await recorded())


async def other_arguments(w: World) -> None:
    await asyncio.gather(w.exec("a"), w.exec("c"))


async def extra_call(w: World) -> None:
    await asyncio.gather(w.exec("a"), w.exec("b"), w.exec("c"))


async def missing_call(w: World) -> None:
    await asyncio.gather(w.exec("a"), asyncio.Event().wait())


async def late_end(w: World) -> None:
    await twice(w)
    await w.exec("late")


async def cancels_a_call(w: World) -> None:
    tasks = [asyncio.create_task(w.exec("a")), asyncio.create_task(w.exec("b"))]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (other_arguments, "after 0 LLM responses (entry 1 of 6 of its journal): "
         'expected a call for exec {"command": "b"} as in the recording, got {"command": "c"}'),
        (extra_call, 'it made a call that is not in the recording: a call for exec {"command": "c"}'),
        (missing_call, 'expected a call for exec {"command": "b"} as in the recording, but it waited'),
        (late_end, "after 1 LLM responses (entry 6 of 6 of its journal): it made a call that is not in the recording"),
        (cancels_a_call, "it cancelled call"),
    ],
)  # fmt: skip
async def test_other_calls_diverge(agent: Program, message: str) -> None:
    assert message in await divergence(agent, await recorded())


async def test_other_message_or_settings_diverge() -> None:
    async def asks(w: World, content: Any = "one", **settings: Any) -> None:
        messages = [{"role": "user", "content": "zero"}, {"role": "user", "content": content}]
        await w.runtime.call("llm", LLMRequest(messages, **settings))

    journal = await recorded(asks)
    message = await divergence(lambda w: asks(w, "1" * 1000), journal)
    assert 'message 2 of 2 of an LLM request differs from the recording: now it is {"content": "111' in message
    assert len(message) < 900
    message = await divergence(lambda w: asks(w, [{"type": "text", "text": "in parts"}]), journal)
    assert "message 2 of 2" in message
    assert "settings of an LLM request" in await divergence(lambda w: asks(w, temperature=0.5), journal)
    assert "settings of an LLM request" in await divergence(lambda w: asks(w, system_prompt="Be kind."), journal)


async def test_more_messages_than_recorded_diverge() -> None:
    async def asks(w: World, count: int = 1) -> None:
        await w.runtime.call("llm", LLMRequest([{"role": "user", "content": "same"}] * count))

    message = await divergence(lambda w: asks(w, 2), await recorded(asks))
    assert "expected an LLM request with 1 messages as in the recording, got an LLM request with 2 messages" in message


async def test_divergence_shows_the_recorded_message() -> None:
    async def asks(w: World, word: str = "black") -> None:
        text = "It is a long story. " * 20 + f"The cat is {word} and white."
        await w.runtime.call("llm", LLMRequest([{"role": "user", "content": text}]))

    journal = await recorded(asks)
    originals = {entry.call_id: entry.arguments for entry in journal.entries if isinstance(entry, CallEntry)}
    world = World(on_disk(journal))
    with pytest.raises(DivergenceError, match=r"it was ….*cat is black and white.*, now it is ….*cat is brown and wh"):
        world.runtime.replay(lambda: asks(world, "brown"), elapsed_sec=1.0, originals=originals)
    await world.runtime.cancel(5)


async def test_calls_after_a_divergence_are_not_executed() -> None:
    async def other(w: World) -> None:
        await w.exec("other")

    world = World(on_disk(await recorded()))
    with pytest.raises(DivergenceError):
        world.runtime.replay(lambda: other(world), elapsed_sec=1.0)
    await asyncio.sleep(0)
    assert (world.performed, world.asked) == ([], [])
    await world.runtime.cancel(5)
    assert (world.performed, world.asked) == ([], [])


async def test_journal_ending_during_a_call_is_refused() -> None:
    journal = await recorded()
    first_done = next(place for place, entry in enumerate(journal.entries) if isinstance(entry, DoneEntry))
    journal.entries = journal.entries[:first_done]
    with pytest.raises(JournalError, match="incomplete: the result of the `exec` call is missing"):
        await again(twice, journal)
