"""Small agents, one for each thing that asyncio can do, and the world that they run in.

Also the program of a process that runs them again: `python -m tests.unit.agents.runtime.programs` reads recordings from
its standard input and prints the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import random
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from ares_exp.agents.runtime.agent_runtime import AgentRuntime
from ares_exp.agents.runtime.journal import Call, Journal, JournalEncoder, decode_journal
from ares_exp.containers.container import ExecResult
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse

Program = Callable[["World"], Coroutine[Any, Any, None]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


class World:
    """What a program finds: calls that end when they like, an LLM that repeats the question, and a log.

    Attributes:
        runtime: Runs the program.
        log: What it noted.
        performed: Calls that were really carried out.
        responses: Whether LLM calls are answered at once.
    """

    def __init__(self, journal: Journal | None, *, responses: bool = True) -> None:
        self.log: list[Any] = []
        self.performed: list[str] = []
        self.asked: list[Call] = []
        self.responses = responses
        self.runtime = AgentRuntime(journal, on_llm=self._on_llm, on_change=self._on_change)
        self._changed = asyncio.Event()
        self._delays = random.SystemRandom()

    async def exec(self, name: str, *, turns: int | None = None, error: Exception | None = None) -> str:
        """From inside the program: a call that takes some turns of the event loop."""
        count = self._delays.randrange(6) if turns is None else turns

        async def perform() -> ExecResult:
            self.performed.append(name)
            self._changed.set()
            for _ in range(count):
                await asyncio.sleep(0)
            if error is not None:
                raise error
            return ExecResult(f"{name}: {self._delays.random()}", exit_code=0, duration_sec=0.0)

        result: ExecResult = await self.runtime.call("exec", {"command": name}, perform)
        return result.output

    async def never(self, name: str, ended: list[str] | None = None) -> None:
        """From inside the program: a call that never ends; when its work is cancelled, `ended` has its name."""

        async def perform() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                if ended is not None:
                    ended.append(name)

        await self.runtime.call("exec", {"command": name}, perform)

    async def ask(self, text: str) -> str:
        """From inside the program: an LLM call."""
        response: LLMResponse = await self.runtime.call("llm", LLMRequest([{"role": "user", "content": text}]))
        return response.text

    async def until(self, condition: Callable[[], object]) -> None:
        """From outside: waits, at most 20 s."""
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def execute(self, agent: Program) -> World:
        """From outside: runs a program to its end."""
        self.runtime.start(lambda: agent(self))
        await self.until(lambda: self.runtime.has_ended)
        self.runtime.task.result()
        return self

    def _on_llm(self, call: Call) -> None:
        self.asked.append(call)
        if self.responses:
            asyncio.get_running_loop().call_soon(self.runtime.deliver, call, self.response_to(call))

    @staticmethod
    def response_to(call: Call) -> LLMResponse:
        return LLMResponse.from_text(call.arguments.messages[-1]["content"].upper())

    def _on_change(self) -> None:
        self._changed.set()


def new_journal(seed: int = 7) -> Journal:
    return Journal(time.time(), seed)


def on_disk(journal: Journal) -> Journal:
    lines = JournalEncoder().update(journal)
    return decode_journal(lines, started_at=journal.started_at, seed=journal.seed, where="the test")


async def again(agent: Program, journal: Journal) -> World:
    world = World(on_disk(journal), responses=False)
    try:
        world.runtime.replay(lambda: agent(world), elapsed_sec=60.0)
    except BaseException:
        await world.runtime.cancel(5)
        raise
    return world


@program
async def order_of_ends(w: World) -> None:
    async def one(name: str) -> None:
        w.log.append(await w.exec(name))

    await asyncio.gather(*(one(f"{place}") for place in range(8)))


@program
async def first_completed(w: World) -> None:
    tasks = [asyncio.create_task(w.exec(f"{place}"), name=f"{place}") for place in range(4)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    w.log.append(sorted(task.get_name() for task in done))
    for task in pending:
        task.cancel()
    await asyncio.wait(tasks)
    w.log.append([task.cancelled() for task in tasks])


@program
async def as_completed(w: World) -> None:
    for finished in asyncio.as_completed([w.exec(f"{place}") for place in range(6)]):
        w.log.append(await finished)


@program
async def same_call_many_times(w: World) -> None:
    w.log.append(await asyncio.gather(*(w.exec("same") for _ in range(5))))


@program
async def task_group_that_fails(w: World) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(w.exec("fails", error=TimeoutError("too slow")))
            group.create_task(w.never("cancelled"))
    except* TimeoutError as errors:
        w.log.append([repr(error) for error in errors.exceptions])


@program
async def timeout_that_may_expire(w: World) -> None:
    for place in range(4):
        try:
            async with asyncio.timeout(0.0005):
                w.log.append(await w.exec(f"{place}", turns=place * 20))
        except TimeoutError:
            w.log.append("late")


@program
async def wait_for(w: World) -> None:
    w.log.append(await asyncio.wait_for(w.exec("in time"), 30))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(w.never("never"), 0.003)
    w.log.append("late")


@program
async def sleeping(w: World) -> None:
    async def sleeper(seconds: float) -> None:
        await asyncio.sleep(seconds)
        w.log.append([seconds, round(time.monotonic(), 6)])

    await asyncio.gather(*(sleeper(seconds) for seconds in (0.004, 0.001, 0.0, 0.002, 0.003)))


@program
async def clock_and_chance(w: World) -> None:
    for place in range(3):
        w.log.append([time.time(), time.perf_counter_ns(), random.random(), random.sample(range(99), 3)])
        w.log.append([uuid.uuid4().hex, uuid.uuid1().hex, time.strftime("%c"), asyncio.get_running_loop().time()])
        await w.exec(f"{place}")
    random.seed(5)
    w.log.append(random.getrandbits(64))


@program
async def locks(w: World) -> None:
    lock, semaphore, condition = asyncio.Lock(), asyncio.Semaphore(2), asyncio.Condition()

    async def one(name: str) -> None:
        async with semaphore, lock:
            w.log.append(await w.exec(name))
        async with condition:
            condition.notify_all()

    tasks = [asyncio.create_task(one(f"{place}")) for place in range(5)]
    async with condition:
        await condition.wait_for(lambda: len(w.log) >= 3)
        w.log.append("three")
    await asyncio.gather(*tasks)


@program
async def queue(w: World) -> None:
    waiting: asyncio.Queue[str] = asyncio.Queue(2)

    async def produce(name: str) -> None:
        for place in range(3):
            await waiting.put(await w.exec(f"{name}{place}"))

    async def consume() -> None:
        while True:
            w.log.append(await waiting.get())
            waiting.task_done()

    consumers = [asyncio.create_task(consume()) for _ in range(2)]
    await asyncio.gather(produce("a"), produce("b"))
    await waiting.join()
    for consumer in consumers:
        consumer.cancel()


@program
async def threads(w: World) -> None:
    def fails() -> None:
        raise LookupError("no plain error")

    results = await asyncio.gather(
        asyncio.to_thread(sorted, "cab"),
        asyncio.to_thread(fails),
        asyncio.get_running_loop().run_in_executor(None, divmod, 7, 2),
        w.exec("beside"),
        return_exceptions=True,
    )
    w.log.append([repr(result) for result in results])


@program
async def ready_callbacks(w: World) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.call_soon(w.log.append, 1)
    loop.call_soon(w.log.append, 2).cancel()
    timer = loop.call_later(0.001, w.log.append, 3)
    loop.call_at(loop.time() + 0.002, ended.set)
    loop.call_later(5, w.log.append, 4).cancel()
    await ended.wait()
    w.log.append(timer.cancelled())


@program
async def shielded(w: World) -> None:
    inner = asyncio.create_task(w.exec("inner", turns=30))
    try:
        async with asyncio.timeout(0.0001):
            await asyncio.shield(inner)
    except TimeoutError:
        w.log.append("late")
    w.log.append(await inner)


@program
async def dropped_generator(w: World) -> None:
    closed = asyncio.Event()

    async def lines() -> AsyncIterator[str]:
        try:
            for place in range(9):
                yield await w.exec(f"line {place}")
        finally:
            w.log.append(await w.exec("closed"))
            closed.set()

    async for line in lines():
        w.log.append(line)
        break
    w.log.append(await w.exec("after"))
    await closed.wait()


@program
async def contexts(w: World) -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name")

    async def one(text: str) -> None:
        name.set(text)
        await w.exec(text)
        task = asyncio.current_task()
        w.log.append([name.get(), task is not None and task.get_name()])

    await asyncio.gather(*(asyncio.create_task(one(f"{place}"), name=f"task {place}") for place in range(4)))


@program
async def questions_at_the_same_time(w: World) -> None:
    w.log.append(await asyncio.gather(*(w.ask(f"question {place}") for place in range(4)), w.exec("beside")))


@program
async def cancelled_while_cleaning_up(w: World) -> None:
    async def tidy() -> None:
        try:
            await w.never("work")
        finally:
            w.log.append(await w.exec("tidied"))

    task = asyncio.create_task(tidy())
    await w.exec("meanwhile")
    task.cancel()
    await asyncio.wait({task})
    w.log.append(task.cancelled())


@program
async def everything(w: World) -> None:
    order = list(PROGRAMS.values())
    random.shuffle(order)
    await asyncio.gather(*(agent(w) for agent in order if agent is not everything))


async def _run_all_again(recordings: Sequence[dict[str, Any]]) -> list[list[Any]]:
    logs = []
    for recording in recordings:
        lines = [line.encode() for line in recording["lines"]]
        journal = decode_journal(lines, started_at=recording["started_at"], seed=recording["seed"], where="the test")
        world = World(journal, responses=False)
        agent = PROGRAMS[recording["program"]]
        world.runtime.replay(lambda agent=agent, world=world: agent(world), elapsed_sec=60.0)  # type: ignore[misc]
        assert world.runtime.has_ended
        assert not world.performed
        logs.append(world.log)
    return logs


if __name__ == "__main__":
    json.dump(asyncio.run(_run_all_again(json.load(sys.stdin))), sys.stdout)
