"""What our own code costs per step: in-memory container, instant policy.

Run by hand: `python -m tests.benchmarks.bench_step`. Prints the CPU microseconds of `env.step` at 1 and 1,000
environments, with an agent that only sends requests and with an agent that also runs commands.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ares_exp.agents.code_agent import AgentContainer, CodeAgent
from ares_exp.containers.container import ContainerSpec, ExecResult
from ares_exp.containers.network_policy import PUBLIC
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.llms.request import LLMClient, LLMRequest, Message
from ares_exp.llms.response import LLMResponse
from ares_exp.runs.experiment import collecting_seldom
from ares_exp.tasks.task_contract import AgentContext, Verdict

STEPS = 50
ROUNDS = 5
EPISODES = 100


class InMemoryContainer:
    image = "memory"

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def upload(self, source: object, target: object) -> None: ...
    async def download(self, source: object, target: object) -> None: ...
    async def set_network(self, policy: object) -> None: ...

    async def exec(self, command: str, **_: object) -> ExecResult:
        return ExecResult(
            output="COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n" if "echo" in command else "ok\n",
            exit_code=0,
            duration_sec=0.0,
        )


class InMemoryFactory:
    name = "memory"

    def __call__(self, spec: ContainerSpec) -> Any:
        return InMemoryContainer()


class InMemoryStage:
    name = ""
    instruction = "Do it."
    agent_timeout_sec = 600.0
    start_timeout_sec = 0.0
    collect_timeout_sec = 600.0
    agent_user = None
    agent_shell = None
    agent_network = PUBLIC
    verifier_timeout_sec = 60.0
    verifier_network = PUBLIC
    verifier_spec = None

    async def start(self, container: object) -> None: ...
    async def collect(self, container: object, target: Path | None) -> None: ...

    async def clear(self, container: object) -> Sequence[str]:
        return ()

    async def upload_solution(self, container: object) -> Mapping[str, str]:
        return {}

    async def verify(self, container: object, output_dir: Path | None) -> Verdict:
        return Verdict(1.0, {"reward": 1.0})


class InMemoryTask:
    name = "bench"
    container_spec = ContainerSpec("bench")
    stages = (InMemoryStage(),)
    context = AgentContext()
    set_up_timeout_sec = 0.0

    async def set_up(self, container: object) -> None: ...

    def reward(self, verdicts: Sequence[Verdict]) -> Verdict:
        return verdicts[-1]

    def describe(self) -> Mapping[str, Any]:
        return {}


COMMAND = LLMResponse.from_text("I look around.\n\n```bash\nls -la\n```\n")


class TrivialAgents:
    """Agents that ask the same `STEPS` times, and run a command after each response if they are told to."""

    name = "trivial"

    def __init__(self, *, with_command: bool) -> None:
        self._with_command = with_command

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> CodeAgent:
        with_command = self._with_command

        class Trivial:
            async def run(self, task: str) -> None:
                request = LLMRequest([Message(role="user", content=task)])
                for _ in range(STEPS):
                    await llm_client(request)
                    if with_command:
                        await container.exec("ls")

        return Trivial()


async def execute(*, with_command: bool) -> None:
    agents = TrivialAgents(with_command=with_command)
    env = CodeEnvironment([InMemoryTask()], container_factory=InMemoryFactory(), code_agent_factory=agents)  # type: ignore[arg-type, list-item]
    async with env:
        time_step = await env.reset()
        while not time_step.last():
            time_step = await env.step(COMMAND)


async def measure(at_once: int, *, with_command: bool) -> float:
    """CPU us per step of `env.step` and its share of making and closing the environment."""
    started, episodes = time.process_time(), 0
    while episodes < EPISODES:
        await asyncio.gather(*(execute(with_command=with_command) for _ in range(at_once)))
        episodes += at_once
    return (time.process_time() - started) / (episodes * STEPS) * 1e6


def main() -> None:
    print(f"CPU us per step, best of {ROUNDS} rounds, {STEPS} steps per episode, Python {sys.version.split()[0]}")
    print(f"{'':<24}{'1 env':>10}{'1,000 envs':>12}")
    for with_command in (False, True):
        with collecting_seldom():  # as a run does
            one, thousand = (
                min(asyncio.run(measure(count, with_command=with_command)) for _ in range(ROUNDS))
                for count in (1, 1000)
            )
        print(f"{'requests, commands' if with_command else 'requests':<24}{one:>10.1f}{thousand:>12.1f}")


if __name__ == "__main__":
    main()
