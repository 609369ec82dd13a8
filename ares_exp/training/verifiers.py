"""An environment for the package verifiers that runs episodes of ares_exp: a taskset and a harness.

```
# file: greetings.py
from ares_exp.training.verifiers import make_plugin

Greetings, GreetingsHarness = make_plugin(env="harbor", overrides=["env.tasks=[write-greeting]"])
__all__ = ["Greetings", "GreetingsHarness"]
```

verifiers finds the plugin by its name: `vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": "greetings"}, …))`.
Each rollout is an episode with the reward of the episode. The agent sends its LLM calls to the endpoint of the rollout,
where verifiers records the tokens. Code runs in containers of ares_exp, so that the rollout can use the runtime
`subprocess`. Requires verifiers 0.4 (`import verifiers.v1`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ares_exp.errors import ConfigError, EndpointError, PolicyError
from ares_exp.llms.openai_chat import request_to_body, response_from_body
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.runs.rollouts import FinishedEpisode, PartsGiven, rollouts


@dataclass(frozen=True)
class _Run:
    """The arguments of `rollouts`. The task is selected with `env.tasks`."""

    env: str
    agent: Any
    container: Any
    overrides: Sequence[str]
    config_dirs: Sequence[str | Path]

    def task_names(self) -> Sequence[str]:
        """Reads the names of the tasks."""
        parts = {"env": self.env, "policy": "noop", "agent": self.agent, "container": self.container}
        values = {"attempts": 1, "concurrency": 1, "seed": 0}
        given = PartsGiven(parts, values, self.overrides, [Path(folder) for folder in self.config_dirs])
        return given.make().parts.source.load(lambda _: None)

    async def execute(self, task: str, policy: Any, *, seed: int) -> FinishedEpisode:
        """Runs a task once."""
        running = rollouts(
            env=self.env,
            policy=policy,
            agent=self.agent,
            container=self.container,
            seed=seed,
            overrides=[*self.overrides, f"env.tasks=['{task}']"],
            config_dirs=self.config_dirs,
        )
        async with aclosing(running) as episodes:
            return await anext(episodes)


def make_plugin(
    *,
    env: str,
    agent: Any = None,
    container: Any = None,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
    request_timeout_sec: float = 600.0,
) -> tuple[type, type]:
    """Creates the classes that a plugin of verifiers exports.

    Args:
        env: Name of the environment's option. It must accept `env.tasks`, like the options for tasks in Harbor's
            format.
        agent: Agent, as for `ares_exp.rollouts`.
        container: Container backend, as for `ares_exp.rollouts`.
        overrides: Overrides, as for `ares_exp.rollouts`.
        config_dirs: Folders of options, as for `ares_exp.rollouts`.
        request_timeout_sec: Time limit for one response, in seconds.

    Returns:
        The class of the taskset and the class of the harness.

    Raises:
        ConfigError: verifiers is not installed.
    """
    try:
        import verifiers.v1 as vf
    except ImportError:
        raise ConfigError("An environment of verifiers needs the package: `pip install 'verifiers>=0.4'`.") from None
    ran = _Run(env, agent, container, overrides, config_dirs)

    class EpisodeState(vf.State):  # type: ignore[misc]
        """The result of a rollout's episode."""

        episode_reward: float | None = None

    class EpisodeTask(vf.Task[vf.TaskData, EpisodeState]):  # type: ignore[misc]
        """A task that is identified by its name."""

        @property
        def key(self) -> str:
            """The name of the task, independent of its position in the taskset."""
            return str(self.data.name)

        @vf.reward  # type: ignore[untyped-decorator]
        async def episode_reward(self, trace: vf.Trace) -> float:
            """Returns the reward of the episode; 0.0 without a reward."""
            return float(trace.state.episode_reward or 0.0)

    class EpisodeTaskset(vf.Taskset[EpisodeTask, vf.TasksetConfig]):  # type: ignore[misc]
        """The tasks of the environment."""

        def load(self) -> Iterator[EpisodeTask]:
            """Yields the tasks. The prompt is the task's name, because the agent writes its own prompts."""
            for name in ran.task_names():
                yield EpisodeTask(vf.TaskData(name=name, prompt=name), self.config.task)

    class EpisodeHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        """Runs an episode in this process. Code runs in a container of ares_exp."""

        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            """Runs the episode of a rollout, and stores its reward in the rollout's state."""
            policy = RolloutEndpoint(endpoint, secret, ctx.model, request_timeout_sec)
            episode = await ran.execute(data.name, policy, seed=int(trace.id[:7], 16))
            trace.state.episode_reward = episode.reward
            if episode.reward is not None:
                return vf.ProgramResult(exit_code=0, stdout=str(episode.outcome), stderr="")
            error = episode.error
            told = "no reward" if error is None else f"{error.type}: {error.message}"
            return vf.ProgramResult(exit_code=1, stdout="", stderr=told)

    return EpisodeTaskset, EpisodeHarness


@dataclass(frozen=True)
class RolloutEndpoint:
    """A policy that sends requests to the endpoint of a verifiers rollout, which chooses the model and the sampling.

    Attributes:
        url: URL of the endpoint.
        secret: API key of the rollout.
        model: Name of the model in requests.
        timeout_sec: Time limit for one response, in seconds.
    """

    url: str
    secret: str
    model: str
    timeout_sec: float

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Responds to one request.

        Raises:
            EndpointError: The endpoint returned an HTTP status other than 200.
            PolicyError: The endpoint cannot be reached, or the time limit was exceeded.
            MalformedResponseError: The body is not a valid chat completion.
        """
        body = request_to_body(request, model=self.model, strict=False, report=lambda _: None)
        limit = aiohttp.ClientTimeout(total=self.timeout_sec)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers={"Authorization": f"Bearer {self.secret}"}) as session,
                session.post(f"{self.url.rstrip('/')}/chat/completions", json={**body, "stream": False}) as response,
            ):
                if response.status != 200:
                    raise EndpointError(f"The endpoint answers {response.status}: {await response.text():.200}")
                read = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PolicyError(
                f"The endpoint of the rollout gave no response: {type(error).__name__}: {error}"
            ) from error
        return response_from_body(read, strict=False, report=lambda _: None)
