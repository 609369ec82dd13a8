"""Code agents that break, each, one of the rules for agents that can be run again."""

import asyncio
import datetime
import os
import random
import threading
from collections.abc import Awaitable, Callable
from time import time
from typing import Any

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.containers.container import ExecOptions
from ares_exp.llms.request import LLMClient, LLMRequest

Work = Callable[["CarelessAgent", int], Awaitable[str]]
"""What an agent does before its LLM call of that number: returns what goes into the prompt."""


class CarelessAgent:
    """Asks its LLM what `work` gives, three times."""

    work: Work

    def __init__(self, *, container: AgentContainer, llm_client: LLMClient) -> None:
        self.container, self.llm = container, llm_client

    async def run(self, task: str) -> None:
        for number in range(4):
            await self.ask(await type(self).work(self, number))

    async def ask(self, text: str) -> str:
        return (await self.llm(LLMRequest([{"role": "user", "content": text}]))).text

    async def exec(self, command: str, **options: Any) -> str:
        given: ExecOptions = {**options}  # type: ignore[typeddict-item]
        return (await self.container.exec(command, **given)).output


class ObjectId(CarelessAgent):
    async def work(self, number: int) -> str:
        return await self.exec(f"tmux new -s agent-{id(self)}" if number == 2 else "true")


class Now(CarelessAgent):
    async def work(self, number: int) -> str:
        return f"It is {datetime.datetime.now()}." if number == 2 else "Hello."


class Entropy(CarelessAgent):
    async def work(self, number: int) -> str:
        return os.urandom(8).hex() if number == 2 else "Hello."


class TimeByName(CarelessAgent):
    async def work(self, number: int) -> str:
        return f"{time():.6f}" if number == 2 else "Hello."


class OwnGenerator(CarelessAgent):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.random = random.Random()

    async def work(self, number: int) -> str:
        return f"{self.random.random()}" if number == 2 else "Hello."


class SharedState(CarelessAgent):
    """The prompt is another one in every agent."""

    made = 0

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        SharedState.made += 1
        self.number = SharedState.made

    async def work(self, number: int) -> str:
        return f"I am agent {self.number}." if number == 2 else "Hello."


class _Made(CarelessAgent):
    made = 0

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        type(self).made += 1
        self.is_first = type(self).made == 1


class ExtraCall(_Made):
    async def work(self, number: int) -> str:
        if number == 2 and not self.is_first:
            await self.exec("echo once more")
        return "Hello."


class SkippedCall(_Made):
    async def work(self, number: int) -> str:
        if number == 2 and self.is_first:
            await self.exec("echo only once")
        return "Hello."


class ReturnsEarly(_Made):
    async def run(self, task: str) -> None:
        for number in range(3 if self.is_first else 2):
            await self.ask(f"{number}")


class NeverReturns(_Made):
    async def run(self, task: str) -> None:
        await self.ask("Hello.")
        if not self.is_first:
            await asyncio.Event().wait()


class AsksNothing(CarelessAgent):
    async def run(self, task: str) -> None:
        await self.exec("true")


class AnotherTimer(_Made):
    async def work(self, number: int) -> str:
        if number == 2:
            await asyncio.sleep(0.001 if self.is_first else 0.002)
        return "Hello."


class OtherSettings(_Made):
    async def ask(self, text: str) -> str:
        request = LLMRequest([{"role": "user", "content": text}], temperature=0.0 if self.is_first else 1.0)
        return (await self.llm(request)).text

    async def work(self, number: int) -> str:
        return "Hello."


class Socket(CarelessAgent):
    async def work(self, number: int) -> str:
        if number == 2:
            await asyncio.open_connection("127.0.0.1", 9)
        return "Hello."


class SocketInSecret(CarelessAgent):
    """Takes the refusal for a network that is down."""

    async def work(self, number: int) -> str:
        if number == 2:
            try:
                await asyncio.open_connection("127.0.0.1", 9)
            except Exception:
                return "Offline."
        return "Hello."


class ThreadThatCalls(CarelessAgent):
    async def work(self, number: int) -> str:
        if number == 2:
            loop, ready = asyncio.get_running_loop(), asyncio.Event()

            def tell() -> None:
                try:
                    loop.call_soon_threadsafe(ready.set)
                except Exception:
                    return

            thread = threading.Thread(target=tell)
            thread.start()
            thread.join()
            await ready.wait()
        return "Hello."


class Subprocess(CarelessAgent):
    async def work(self, number: int) -> str:
        if number == 2:
            await asyncio.create_subprocess_exec("true")
        return "Hello."


class Swallower(CarelessAgent):
    """Continues whatever happens, even after a reply that corrects it."""

    async def work(self, number: int) -> str:
        while True:
            try:
                return await self.exec(f"echo {id(self)}" if number == 2 else "true")
            except Exception:
                continue


class OwnError(Exception):
    """Nobody else knows it."""


class ToldOfAnOwnError(CarelessAgent):
    """Needs a container that raises `OwnError` at the command `fail`."""

    async def work(self, number: int) -> str:
        try:
            return await self.exec("fail" if number == 2 else "true")
        except OwnError:
            return "failed"


def fails_in_its_own_way(command: str) -> str:
    """For a container: raises at the command `fail`."""
    if command == "fail":
        raise OwnError(command)
    return command


class NeverWakes(CarelessAgent):
    async def work(self, number: int) -> str:
        if number == 2:
            await asyncio.Event().wait()
        return "Hello."


class RunsAway(CarelessAgent):
    """Waits for its own command in a way that leaves the loop no time to run it."""

    async def work(self, number: int) -> str:
        if number == 2:
            working = asyncio.create_task(self.exec("true"))
            while not working.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
        return "Hello."
