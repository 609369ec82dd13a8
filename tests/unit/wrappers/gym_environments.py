"""Small real environments for the wrapper tests, and module-level factories for vector environments."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass
from typing import Any

from ares_exp.environment import TimeStep, restart, termination, transition, truncation
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.wrappers.spaces import TextAction, TextObservation
from ares_exp.wrappers.sync_gym import GymWrapper

ACTION = LLMResponse.from_text("one more")


def request(text: str) -> LLMRequest:
    return LLMRequest(messages=[{"role": "user", "content": text}])


class PlainEnvironment:
    """Asks nothing of anybody: every subclass overrides what it is about."""

    def __init__(self) -> None:
        self.closed = 0
        self.exits: list[type[BaseException] | None] = []
        self.threads: set[str] = set()

    async def reset(self) -> TimeStep[LLMRequest]:
        return restart(request("first"))

    async def step(self, action: Any) -> TimeStep[LLMRequest]:
        return transition(request("next"))

    async def close(self) -> None:
        await asyncio.sleep(0.001)
        self.threads.add(threading.current_thread().name)
        self.closed += 1

    async def __aenter__(self) -> PlainEnvironment:
        return self

    async def __aexit__(self, exc_type: Any, exc: Any, traceback: Any) -> None:
        self.exits.append(exc_type)
        await self.close()


class BareEnvironment:
    """All that an environment needs, and nothing else: no `async with`, no seed, no options."""

    def __init__(self, length: int = 3) -> None:
        self.length, self.count, self.closed = length, 0, 0

    async def reset(self) -> TimeStep[LLMRequest]:
        self.count = 0
        return restart(request("count to the end"))

    async def step(self, action: Any) -> TimeStep[LLMRequest]:
        self.count += 1
        return transition(request(f"count {self.count}")) if self.count < self.length else termination(1.0)

    async def close(self) -> None:
        self.closed += 1


class CountingEnvironment(PlainEnvironment):
    """Counts to `length`. A seed chooses the task's number, or `options={"task": …}` does."""

    def __init__(self, length: int = 3, *, truncate: bool = False) -> None:
        super().__init__()
        self.length = length
        self.truncate = truncate
        self.count = 0
        self.task = 0
        self.random = random.Random(0)

    async def reset(self, *, seed: int | None = None, options: Any = None) -> TimeStep[LLMRequest]:
        if seed is not None:
            self.random.seed(seed)
        self.task = options["task"] if options else self.random.randrange(1000)
        self.count = 0
        return restart(request(f"task {self.task}"))

    async def step(self, action: LLMResponse) -> TimeStep[LLMRequest]:
        await asyncio.sleep(0)
        self.threads.add(threading.current_thread().name)
        self.count += 1
        if self.count < self.length:
            return transition(request(f"task {self.task}, count {self.count}, after {action.text}"), 0.25)
        return truncation(None) if self.truncate else termination(1.0)


class PassingOnEnvironment(PlainEnvironment):
    """Wraps another environment, as a collecting one does."""

    def __init__(self, env: CountingEnvironment) -> None:
        super().__init__()
        self.env = env

    async def reset(self, **kwargs: Any) -> TimeStep[LLMRequest]:
        return await self.env.reset(**kwargs)


class RaisingEnvironment(PlainEnvironment):
    """Raises the same object at every step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    async def step(self, action: Any) -> TimeStep[LLMRequest]:
        raise self.error


class BlockingEnvironment(PlainEnvironment):
    """A step that never ends; a cancelled one needs a moment to unwind."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = threading.Event()
        self.unwound = 0

    async def reset(self) -> TimeStep[LLMRequest]:
        await asyncio.sleep(0.001)
        return restart(request("first"))

    async def step(self, action: Any) -> TimeStep[LLMRequest]:
        self.stepping.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.005)
            self.unwound += 1
        raise AssertionError("unreachable")


class StubbornEnvironment(PlainEnvironment):
    """A step that does not take a cancellation for a response."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = threading.Event()

    async def step(self, action: Any) -> TimeStep[LLMRequest]:
        while True:
            self.stepping.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue


class AgentEnvironment(PlainEnvironment):
    """Has an agent that goes on between the calls, as a code agent does."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0
        self.enough = threading.Event()

    async def reset(self) -> TimeStep[LLMRequest]:
        self.agent = asyncio.create_task(self._tick())
        return restart(request("first"))

    async def step(self, action: Any) -> TimeStep[LLMRequest]:
        assert not self.agent.done()
        return transition(request(f"{self.ticks} ticks"))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self.ticks += 1
            if self.ticks == 5:
                self.enough.set()


@dataclass(frozen=True)
class ForeignTimeStep:
    """Another package's: the same four fields, none of the methods."""

    step_type: str
    reward: Any
    discount: Any
    observation: Any


class ForeignEnvironment:
    """Another package's environment: the protocol and nothing else."""

    def __init__(self, length: int = 3) -> None:
        self.env = CountingEnvironment(length)

    async def reset(self) -> ForeignTimeStep:
        return ForeignTimeStep(*await self.env.reset())

    async def step(self, action: Any) -> ForeignTimeStep:
        return ForeignTimeStep(*await self.env.step(action))

    async def close(self) -> None:
        await self.env.close()

    async def __aenter__(self) -> ForeignEnvironment:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def make_counting_gym(render_mode: str | None = None) -> GymWrapper:
    return GymWrapper(CountingEnvironment(), render_mode=render_mode)


def make_bare_gym(render_mode: str | None = None) -> GymWrapper:
    return GymWrapper(BareEnvironment(), render_mode=render_mode)


def make_text_gym(length: int = 3) -> TextAction:
    return TextAction(TextObservation(GymWrapper(CountingEnvironment(length))))


def make_counting_gym_of(length: int) -> GymWrapper:
    return GymWrapper(CountingEnvironment(length))
