"""The agent of the golden journal. Changing it, or the Python functions that it uses, breaks the test that reads it.

`python -m tests.unit.agents.runtime.golden_agent FILE` records a journal anew, for a new schema.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, cast

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.runtime.journal import Journal, JournalEncoder, StepEntry
from ares_exp.containers.activity import CommandRecord
from ares_exp.containers.container import Container, ExecResult
from ares_exp.environments.agent_host import AgentHost
from ares_exp.errors import TransferError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.testing.echo_container import RehearsalContainer

STARTED_AT, SEED = 1_750_000_000.25, 42
REPLIES = ["first é\n", 'second "quoted"', "third"]


class GoldenAgent:
    def __init__(self, *, container: AgentContainer, llm_client: LLMClient) -> None:
        self.container, self.llm = container, llm_client
        self.messages: list[dict[str, Any]] = []

    async def run(self, task: str) -> None:
        self.say([task, time.time(), random.random(), random.getrandbits(64), uuid.uuid4().hex])
        for place in range(len(REPLIES)):
            if place == 1:
                self.messages[0] = {"role": "user", "content": [{"type": "text", "text": "rewritten"}]}
            reply = await self.llm(LLMRequest(self.messages, system_prompt="Be golden.", temperature=0.5))
            self.messages.append({"role": "assistant", "content": reply.text})
            await self.work(reply.text)

    async def work(self, reply: str) -> None:
        both = await asyncio.gather(
            self.container.exec(reply, timeout_sec=3, cwd="/tmp", env={"A": "ü"}), self.container.exec("second")
        )
        self.say([[one.output, one.exit_code, one.timed_out] for one in both])
        await asyncio.sleep(0.002)
        self.say([await asyncio.to_thread(sorted, reply), time.monotonic()])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file"
            path.write_text(reply)
            await self.container.upload(path, "/file")
            await self.container.download("/file", Path(folder) / "back")
            self.say((Path(folder) / "back").read_text())
        try:
            await self.container.download("/none", "/none")
        except TransferError as error:
            self.say(str(error))

    def say(self, what: Any) -> None:
        self.messages.append({"role": "user", "content": json.dumps(what)})


def respond(command: str) -> ExecResult:
    return ExecResult(f"{command}: {random.SystemRandom().random()}\n", None if command == "second" else 3, 0.125, True)


async def record(path: Path) -> None:
    journal = Journal(STARTED_AT, SEED)
    host = AgentHost(cast("Container", RehearsalContainer(respond)), journal)
    host.start(GoldenAgent, "Shine.", timeout_sec=None)
    for place, reply in enumerate(REPLIES):
        await host.next_request()
        assert host.observed is not None
        commands = tuple(CommandRecord(reply, 3, 0.125, True) for _ in range(place))
        journal.entries.append(
            StepEntry(
                host.observed.call_id, STARTED_AT + place, None if place == 0 else 0.0, 1.5, 0.25, 0.125, commands
            )
        )
        host.respond(LLMResponse.from_text(reply, cost=0.25, usage=Usage(10, place), model="golden"))
    assert await host.next_request() is None
    await host.cancel()
    path.write_bytes(b"".join(line + b"\n" for line in JournalEncoder().update(journal)))


if __name__ == "__main__":
    asyncio.run(record(Path(sys.argv[1])))
