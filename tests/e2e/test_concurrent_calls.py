"""A run whose agent asks five things at once, killed while four of the responses wait for their turn, and resumed."""

import asyncio
import json
import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.leaks import wait_until
from tests.loopback_endpoint import LoopbackEndpoint, Received, completion
from tests.warm_start import WarmProcess

pytestmark = [pytest.mark.local, pytest.mark.timeout(300)]

AGENT = """
import asyncio

from ares_exp.agents.code_agent import AgentFactoryBase
from ares_exp.llms.request import LLMRequest


class FanOut:
    def __init__(self, container, llm_client):
        self.container, self.llm = container, llm_client

    async def run(self, task):
        async def ask(number):
            response = await self.llm(LLMRequest([{"role": "user", "content": f"question {number}"}]))
            await self.container.exec(f"echo {response.text} >> /app/heard")

        await asyncio.gather(*(ask(number) for number in range(5)))
        await self.container.exec("echo Hello, harbor! > /app/greeting.txt")


class FanOutFactory(AgentFactoryBase):
    name = "fan_out"

    def __call__(self, *, container, llm_client):
        return FanOut(container, llm_client)
"""


class FirstIsSlow(LoopbackEndpoint):
    """Answers at once, but for the first question, which it answers when it may.

    Attributes:
        asked: How often each question was asked.
        may_response: Lets the first question be answered.
    """

    def __init__(self) -> None:
        super().__init__(otherwise=self._respond)
        self.asked: Counter[str] = Counter()
        self.may_response = threading.Event()

    async def _respond(self, _: web.Request, received: Received) -> web.StreamResponse:
        question = received.body["messages"][-1]["content"]
        self.asked[question] += 1
        if question == "question 0":
            await asyncio.to_thread(self.may_response.wait, 100)
        return web.json_response(completion(f"answer to {question}", model=received.body["model"]))


@pytest.fixture
def endpoint() -> Iterator[FirstIsSlow]:
    with FirstIsSlow() as server:
        yield server


def command(directory: Path, *words: str) -> WarmProcess:
    environment = {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{Path.cwd()}"}
    with (directory / "said").open("wb") as said:
        return WarmProcess(words, cwd=directory, env=environment, stdout=said, stderr=subprocess.STDOUT)


def ahead(directory: Path) -> list[dict[str, object]]:
    """The responses in the log that have come ahead of their turn."""
    lines = [line for log in directory.glob("run/responses/*.jsonl") for line in log.read_text().splitlines()]
    return [one for one in map(json.loads, lines) if "ahead" in one]


@pytest.mark.parametrize(
    "more",
    [pytest.param([], marks=pytest.mark.nightly), ["snapshot=every_step", "collector=none"]],
    ids=["", "snapshots"],
)
def test_queued_responses_survive_sigkill(tmp_path: Path, endpoint: FirstIsSlow, more: list[str]) -> None:
    (tmp_path / "fan_out.py").write_text(AGENT)
    (tmp_path / "options" / "agent").mkdir(parents=True)
    (tmp_path / "options" / "agent" / "fan_out.yaml").write_text("_target_: fan_out.FanOutFactory\n")
    run = command(
        tmp_path,
        *("--config-dir", "options", "agent=fan_out", "env.tasks=write-greeting", "container=local", "tracker=none"),
        *("policy=openai", "policy.model=m", f"policy.base_url={endpoint.url}", "policy.api_key_env=null"),
        *("policy.prices={m:{input_per_million_usd:1000,output_per_million_usd:3000}}", "hydra.run.dir=run"),
        *more,
    )
    try:
        assert wait_until(lambda: len(ahead(tmp_path)) == 4 or run.poll() is not None, 60)
        assert run.poll() is None, (tmp_path / "said").read_text()
        os.kill(run.pid, signal.SIGKILL)
    finally:
        run.kill()
        run.wait()
    assert endpoint.asked == {f"question {number}": 1 for number in range(5)}
    endpoint.may_response.set()
    assert command(tmp_path, "resume=run").wait(120) == 0, (tmp_path / "said").read_text()
    assert endpoint.asked == {f"question {number}": 2 if number == 0 else 1 for number in range(5)}
    lost, row = map(json.loads, (tmp_path / "run" / "episodes.jsonl").read_text().splitlines())
    assert (lost["outcome"], lost["num_steps"], lost["prompt_tokens"]) == ("lost", 0, 40)
    assert (row["reward"], row["num_steps"], row["prompt_tokens"], row["replayed"]["prompt_tokens"]) == (1, 5, 50, 40)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["prompt_tokens"], summary["generated_tokens"], round(summary["cost"], 6)) == (50, 25, 0.125)
    if more:
        return
    [trajectory] = [
        json.loads(path.read_text()) for path in (tmp_path / "run" / "trajectories").glob(f"{row['episode_id']}.json")
    ]
    assert [step["action"]["data"] for step in trajectory["steps"][1:]] == [
        [{"content": f"answer to question {number}"}] for number in range(5)
    ]
