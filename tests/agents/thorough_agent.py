"""A code agent that does everything that an agent may do at the same time: the hardest to run again."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.containers.container import ExecResult
from ares_exp.errors import ContainerError
from ares_exp.llms.request import LLMClient, LLMRequest

DONE = "done"


class ThoroughAgentFactory:
    """Makes thorough agents.

    Attributes:
        options: Options of `CodeAgentFactory`.
    """

    def __init__(self, *, patience_sec: float = 0.05, settled: bool = False) -> None:
        """Keeps the options.

        Args:
            patience_sec: How long an agent waits for what takes too long.
            settled: Whether to omit text that differs between episodes, such as clocks and random numbers.
        """
        self.options = {"patience_sec": patience_sec, "settled": settled}

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> ThoroughAgent:
        """A fresh agent."""
        return ThoroughAgent(container, llm_client, **self.options)  # type: ignore[arg-type]


class ThoroughAgent:
    """Each round asks two LLMs at the same time and does what the last response says."""

    def __init__(self, container: AgentContainer, llm_client: LLMClient, *, patience_sec: float, settled: bool) -> None:
        self._container, self._llm = container, llm_client
        self._patience_sec, self._settled = patience_sec, settled
        self.seen: list[Any] = []

    async def run(self, task: str) -> None:
        """Works until a response is `done`."""
        self.seen.append([task, uuid.uuid4().hex, random.random(), *self._unless_settled(time.ctime(), time.time())])
        lock, commands = asyncio.Lock(), "true"
        while commands != DONE:
            await self._all_at_once(commands)
            await self._one_after_another(lock)
            await self._too_slow()
            await self._copy()
            await asyncio.sleep(random.uniform(0.0, 0.002))
            self.seen.append(await asyncio.to_thread(sorted, [3, 1, 2]))
            self.seen.append([type(await self._failing()).__name__, random.getrandbits(64)])
            self.seen.append(self._unless_settled(time.monotonic(), asyncio.get_running_loop().time()))
            first, commands = await asyncio.gather(self._ask("critic", 2), self._ask("worker", len(self.seen)))
            self.seen.append([first, commands])

    async def _all_at_once(self, command: str) -> None:
        results = await asyncio.gather(*(self._exec(f"{command}; echo gathered {place}") for place in range(3)))
        self.seen.append([result.output for result in results])
        racing = [self._exec(f"echo completed {place}") for place in range(3)]
        completed = [(await finished).output for finished in asyncio.as_completed(racing)]
        self.seen.append(sorted(completed) if self._settled else completed)
        tasks = [asyncio.create_task(self._exec(f"echo racing {place}")) for place in range(3)]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        self.seen.append(self._unless_settled(sorted(task.result().output for task in done)))

    async def _one_after_another(self, lock: asyncio.Lock) -> None:
        async def locked(place: int) -> None:
            async with lock:
                self.seen.append((await self._exec(f"echo locked {place} {random.randrange(1000)}")).output)

        async with asyncio.TaskGroup() as group:
            for place in range(2):
                group.create_task(locked(place))

    async def _too_slow(self) -> None:
        try:
            async with asyncio.timeout(self._patience_sec):
                await self._exec("sleep 30")
        except TimeoutError:
            self.seen.append("gave up")
        slow = await self._exec("echo started; sleep 30", timeout_sec=self._patience_sec)
        self.seen.append([slow.timed_out, *self._unless_settled(slow.output)])

    async def _copy(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            note, back = Path(folder) / "note", Path(folder) / "back"
            await asyncio.to_thread(note.write_text, json.dumps(self.seen[-1]))
            await self._container.upload(note, "/tmp/note")
            await self._container.download("/tmp/note", back)
            self.seen.append(back.read_text())

    async def _failing(self) -> Exception:
        try:
            await self._container.download("/no/such/file", "/no/such/folder/file")
        except ContainerError as error:
            return error
        raise AssertionError("downloaded what is not there")

    def _unless_settled(self, *values: Any) -> list[Any]:
        return [] if self._settled else list(values)

    async def _ask(self, role: str, shown: int) -> str:
        messages = [{"role": "user", "content": json.dumps(one)} for one in self.seen[-shown:]]
        return (await self._llm(LLMRequest(messages, system_prompt=f"You are the {role}."))).text

    async def _exec(self, command: str, **options: Any) -> ExecResult:
        return await self._container.exec(command, **options)


def respond(command: str) -> ExecResult:
    """What an in-memory container gives for the commands of the agent."""
    slow = "sleep" in command
    return ExecResult(
        "started\n" if slow else f"{command}!\n", exit_code=None if slow else 0, duration_sec=0.01, timed_out=slow
    )
