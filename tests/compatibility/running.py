"""Runs an `Episode` like a run does, by env=harbor, a container and a policy, and returns its outcome by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ares_exp.agents.code_agent import AgentContainer, CodeAgentFactory, as_agent_factory
from ares_exp.agents.shell_agent import SUBMIT, ShellAgentFactory, bash_blocks
from ares_exp.containers.container import ContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits, TimeLimits
from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import AresExpError
from ares_exp.llms.request import LLMClient, LLMRequest, Message
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.episode_events import EpisodeEvents
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.policies.scripted import ScriptedPolicy
from ares_exp.rollout import run_episode
from tests.compatibility.case import DONE, Episode, write_task
from tests.compatibility.outcome import files_below, manifest


async def execute(case: Episode, folder: Path) -> dict[str, Any]:
    """Runs the case in `folder`; returns what there is to be said of it, by the names of `Episode.expected`."""
    root = write_task(folder / "tasks" / "a-task", case.files, case.links)
    output, warnings = folder / "out", list[str]()
    asked: list[LLMRequest] = []
    outcome: dict[str, Any] = {"error": None, "message": "", "started": False, "reward": None, "rewards": None}
    environment: CodeEnvironment | None = None
    try:
        source = HarborEnvironments(path=root, **case.options)
        (name,) = source.load(warnings.append)
        parts = EpisodeParts(
            container_factory=_containers(case),
            code_agent_factory=_agents(case),
            limits=EpisodeLimits(time=TimeLimits(**case.limits)),
            seed=0,
            provide_solution=case.agent == "oracle",
            output_dir=output,
        )
        source.check(parts, report=warnings.append)
        environment = source.make(name, parts)
        outcome["started"] = True
        last = await run_episode(environment, _noting(_policy(case), asked), EpisodeEvents())
        outcome["reward"] = last.reward
    except AresExpError as error:
        outcome |= {"error": type(error).__name__, "message": str(error)}
    if environment is not None:
        outcome["rewards"] = dict(environment.verdict.rewards) if environment.verdict is not None else None
        outcome["truncated_by"] = environment.truncated_by
        outcome["steps"] = {stage.name: stage.reward for stage in environment.report().stages}
    return outcome | {
        "warnings": "\n".join(warnings),
        "asked": "\n".join(str(message["content"]) for message in asked[0].messages) if asked else "",
        "files": files_below(output),
        "manifest": manifest(output / "artifacts" / "manifest.json"),
    }


def _containers(case: Episode) -> ContainerFactory:
    if case.container == "docker":
        from ares_exp.containers.docker import DockerContainerFactory

        return DockerContainerFactory()
    from ares_exp.containers.local import LocalContainerFactory

    return LocalContainerFactory(network=case.network)


def _policy(case: Episode) -> LLMClient:
    if case.agent == "oracle":
        return OraclePolicy()
    submit = f"echo {SUBMIT}"
    commands = [submit if command == DONE else command for command in case.agent]
    return ScriptedPolicy(replies=[f"```bash\n{command}\n```" for command in [*commands, submit]])


def _noting(policy: LLMClient, asked: list[LLMRequest]) -> Callable[[LLMRequest], Any]:
    async def respond(request: LLMRequest) -> LLMResponse:
        asked.append(request)
        return await policy(request)

    return respond


def _agents(case: Episode) -> CodeAgentFactory:
    return as_agent_factory(_RaisingAgent) if case.raises else ShellAgentFactory(command_timeout_sec=30)


class _RaisingAgent:
    """Runs one command, and raises."""

    def __init__(self, *, container: AgentContainer, llm_client: LLMClient) -> None:
        self._container = container
        self._llm = llm_client

    async def run(self, task: str) -> None:
        reply = await self._llm(LLMRequest([Message(role="user", content=task)]))
        (command,) = bash_blocks(reply.text)
        await self._container.exec(command)
        raise RuntimeError("on purpose")
