"""Shared by the tests of snapshots: agents from functions, episodes run to their end, and what was left running."""

import os
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.trajectories.records import EpisodeTrajectory

Work = Callable[[Any, Any], Coroutine[Any, Any, None]]
Restore = Callable[..., Awaitable[CodeEnvironment]]
"""The fixture `restore`."""


def run(command: str, **more: Any) -> LLMResponse:
    return LLMResponse.from_text(f"I think.\n\n```bash\n{command}\n```\n", **more)


SUBMIT = run("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def ask(text: str = "?") -> LLMRequest:
    return LLMRequest([{"role": "user", "content": text}])


def say(text: str) -> LLMResponse:
    return LLMResponse.from_text(text, usage=Usage(5, 2), cost=0.25)


def agent_of(work: Work) -> Any:
    """A factory of agents from a coroutine function of (container, llm_client)."""

    class Agent:
        def __init__(self, container: Any, llm_client: Any) -> None:
            self.container, self.llm = container, llm_client

        async def run(self, task: str) -> None:
            await work(self.container, self.llm)

    def factory(*, container: Any, llm_client: Any) -> Agent:
        return Agent(container, llm_client)

    return factory


def last_message(env: Any) -> str:
    return str(env.time_step.observation.messages[-1]["content"])


async def run_on(env: Any, replies: Sequence[LLMResponse]) -> Any:
    """Steps with the replies from where the environment is; returns the last time step."""
    for reply in replies[env.step_count :]:
        await env.step(reply)
    return env.time_step


def without_clocks(trajectory: EpisodeTrajectory) -> list[Any]:
    """What two episodes have in common that go the same way."""
    return [
        (
            (step.step_index, step.step_type, step.reward, step.discount),
            (step.observation, step.action),
            [(one.command, one.exit_code, one.timed_out) for one in step.commands or ()],
        )
        for step in trajectory.steps
    ]


def running_boxes() -> set[str]:
    boxes = subprocess.run(["pgrep", "-P", str(os.getpid()), "bwrap"], capture_output=True, text=True, check=False)
    return set(boxes.stdout.split())
