"""The loop by itself: its order, what it refuses, and that nothing of it is left in place."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from ares_exp.agents.runtime.agent_loop import AgentLoop
from ares_exp.errors import NondeterministicCallError


class Owner:
    def __init__(self) -> None:
        self.timers: list[asyncio.TimerHandle] = []
        self.reported: list[dict[str, Any]] = []
        self.refused: list[NondeterministicCallError] = []

    def set_timer(self, handle: asyncio.TimerHandle) -> None:
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
    return AgentLoop(owner), owner  # type: ignore[abstract, arg-type]


def pump(loop: AgentLoop) -> None:
    loop.pump(nullcontext())


async def test_nothing_happens_until_it_is_pumped_and_then_all_that_can() -> None:
    loop, _ = new_loop()
    seen: list[int] = []

    async def work() -> None:
        for number in range(3):
            seen.append(number)
            await asyncio.sleep(0)

    task = loop.create_task(work())
    assert seen == []
    pump(loop)
    assert (seen, task.done()) == ([0, 1, 2], True)


async def test_callbacks_run_in_the_order_in_which_they_were_given() -> None:
    loop, _ = new_loop()
    seen: list[str] = []
    loop.call_soon(seen.append, "a")
    loop.call_soon(lambda: loop.call_soon(seen.append, "c"))
    loop.call_soon(seen.append, "gone").cancel()
    loop.call_soon(seen.append, "b")
    pump(loop)
    assert seen == ["a", "b", "c"]


async def test_inside_it_is_the_running_loop_and_outside_the_other() -> None:
    outer = asyncio.get_running_loop()
    loop, _ = new_loop()
    seen: list[object] = []

    async def work() -> None:
        seen.extend([asyncio.get_running_loop(), loop.is_running(), asyncio.current_task()])

    task = loop.create_task(work())
    pump(loop)
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
        pump(inner)
        look("task")
        assert seen["nested"] == (inner_task, None)

    task = loop.create_task(work())
    loop.call_soon(look, "callback")
    pump(loop)
    task.result()
    assert (seen["task"], seen["callback"]) == ((task, None), (None, None))
    assert asyncio.current_task() is outer_task


async def test_pump_from_a_callback_has_no_task_to_restore() -> None:
    outer = asyncio.get_running_loop()
    loop, _ = new_loop()
    after = outer.create_future()

    async def work() -> None:
        await asyncio.sleep(0)

    task = loop.create_task(work())
    outer.call_soon(lambda: (pump(loop), after.set_result(asyncio.current_task())))
    assert await after is None
    assert task.done()


async def test_what_ends_the_program_passes_and_leaves_everything_in_place() -> None:
    outer, outer_task = asyncio.get_running_loop(), asyncio.current_task()
    loop, _ = new_loop()
    after: list[int] = []

    async def interrupted() -> None:
        raise KeyboardInterrupt

    task = loop.create_task(interrupted())
    loop.call_soon(after.append, 1)
    with pytest.raises(KeyboardInterrupt):
        pump(loop)
    assert isinstance(task.exception(), KeyboardInterrupt)
    assert (asyncio.get_running_loop(), asyncio.current_task()) == (outer, outer_task)
    pump(loop)
    assert after == [1]


async def test_sys_exit_ends_a_task_and_no_more() -> None:
    loop, _ = new_loop()
    seen: list[int] = []

    async def leaves() -> None:
        raise SystemExit(3)

    task = loop.create_task(leaves())
    loop.call_soon(seen.append, 1)
    pump(loop)
    assert seen == [1]
    assert isinstance(task.exception(), SystemExit)


async def test_timers_are_the_owners_affair() -> None:
    loop, owner = new_loop()
    seen: list[str] = []
    loop.now = 3.0
    first, second = loop.call_later(2, seen.append, "first"), loop.call_at(4, seen.append, "second")
    assert [handle.when() for handle in owner.timers] == [5.0, 4.0]
    second.cancel()
    assert owner.timers == [first]
    loop.run_soon(first)
    pump(loop)
    assert seen == ["first"]


async def test_what_nobody_awaits_is_reported() -> None:
    loop, owner = new_loop()

    async def fails() -> None:
        raise ValueError("unheard")

    loop.create_task(fails())
    loop.call_soon(lambda: 1 / 0)
    pump(loop)
    await asyncio.sleep(0)
    kinds = [type(context["exception"]) for context in owner.reported]
    assert sorted(kinds, key=str) == [ValueError, ZeroDivisionError]


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


def test_no_sockets_processes_signals_and_threads() -> None:
    wanted = {"create_connection", "create_server", "sock_recv", "subprocess_exec", "add_signal_handler", "getaddrinfo"}
    assert wanted | {"call_soon_threadsafe", "run_until_complete", "add_reader"} <= set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
async def test_everything_else_is_refused_by_name(name: str) -> None:
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
    pump(loop)
    task.result()
    assert raised == owner.refused
    assert f"`{name}`" in str(raised[0])
    assert "deterministic = False" in str(raised[0])
