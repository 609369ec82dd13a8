"""A plugin for the package verifiers: an environment, a taskset and a harness that run episodes of ares_exp.

```
# file: greetings.py
from ares_exp.training.verifiers import make_plugin

Greetings, GreetingsHarness, GreetingsEnv = make_plugin(["env=harbor", "env.tasks=[write-greeting]"])
__all__ = ["Greetings", "GreetingsHarness", "GreetingsEnv"]
```

verifiers finds the plugin by its name: `vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": "greetings"}, …))`.
While verifiers serves the environment, one run (`ares_exp.driven`) executes and records all rollouts. Each rollout is
an episode and gets its reward. The agent sends its LLM calls to the endpoint of the rollout, where verifiers records
the tokens. The agent's commands run in containers of ares_exp. verifiers itself therefore needs no container, so
its runtime `subprocess` is sufficient. Requires verifiers 0.4 (`import verifiers.v1`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ares_exp.cancellation import finish
from ares_exp.config.hydra_setup import compose_config
from ares_exp.environments.source import make_scored_source
from ares_exp.errors import ConfigError, EndpointError, PolicyError
from ares_exp.llms.openai_chat import request_to_body, response_from_body
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.runs.scheduler import Slot
from ares_exp.training.driver import DrivenEpisode, EpisodeDriver, driven


class _ServedRun(Policy):
    """The run that executes the rollouts. It is also the run's policy, which sends calls to the rollouts' endpoints."""

    def __init__(self, overrides: Sequence[str], config_dirs: Sequence[Path]) -> None:
        self._overrides = overrides
        self._config_dirs = config_dirs
        self._open = AsyncExitStack()
        self._driver: EpisodeDriver | None = None
        self._endpoints: dict[Slot, RolloutEndpoint] = {}

    async def start(self) -> None:
        """Starts the run. Limits of the run, such as its budget, apply to all rollouts together."""
        self._driver = await self._open.enter_async_context(
            driven(self._overrides, policy=self, config_dirs=self._config_dirs)
        )

    async def stop(self) -> None:
        """Cancels running episodes, releases their containers, and closes the run. Idempotent."""
        self._driver = None
        await self._open.aclose()

    def task_names(self) -> Sequence[str]:
        config = compose_config(self._overrides, config_dirs=self._config_dirs)
        return make_scored_source(config).load(lambda _: None)

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        return self._endpoints[episode.task_name, episode.attempt]

    async def execute(self, task: str, endpoint: RolloutEndpoint) -> DrivenEpisode | None:
        """Runs one attempt at a task. Returns `None` if the run ended before the attempt did.

        If the caller is cancelled, the attempt is cancelled, and its containers are released first.
        """
        if self._driver is None:
            raise ConfigError(
                "This harness needs the environment of the same plugin, which is not running. Export all three classes "
                "of `make_plugin` in `__all__`."
            )
        submission = self._driver.submit([task])
        [slot] = submission.slots
        self._endpoints[slot] = endpoint
        try:
            return await anext(submission, None)
        finally:
            await finish(submission.cancel())
            del self._endpoints[slot]


def make_plugin(
    overrides: Sequence[str], *, config_dirs: Sequence[str | Path] = (), request_timeout_sec: float = 600.0
) -> tuple[type, type, type]:
    """Creates the classes that a plugin of verifiers exports.

    Args:
        overrides: Overrides of the run, as for `ares_exp.driven`. `policy` has no effect.
        config_dirs: Folders of options, as for `--config-dir`.
        request_timeout_sec: Time limit for one response, in seconds.

    Returns:
        The classes of the taskset, the harness and the environment.

    Raises:
        ConfigError: verifiers is not installed.
    """
    try:
        import verifiers.v1 as vf
    except ImportError:
        raise ConfigError("The environment needs the package verifiers: `pip install 'verifiers>=0.4'`.") from None
    run = _ServedRun(overrides, [Path(folder) for folder in config_dirs])

    class EpisodeState(vf.State):  # type: ignore[misc]
        """The state of a rollout, which stores the reward of its episode."""

        episode_reward: float | None = None

    class EpisodeTask(vf.Task[vf.TaskData, EpisodeState]):  # type: ignore[misc]
        """A task of ares_exp in the taskset."""

        @property
        def key(self) -> str:
            """The name of the task, which identifies the task independently of its position in the taskset."""
            return str(self.data.name)

        @vf.reward  # type: ignore[untyped-decorator]
        async def episode_reward(self, trace: vf.Trace) -> float:
            """Returns the reward of the episode; 0.0 without a reward."""
            return float(trace.state.episode_reward or 0.0)

    class EpisodeTaskset(vf.Taskset[EpisodeTask, vf.TasksetConfig]):  # type: ignore[misc]
        """The taskset, which contains the tasks that the overrides of the run select."""

        def load(self) -> Iterator[EpisodeTask]:
            """Yields the tasks. The prompt is the task's name, because the agent writes its own prompts."""
            for name in run.task_names():
                yield EpisodeTask(vf.TaskData(name=name, prompt=name), self.config.task)

    class EpisodeHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        """The harness, which runs an episode in this process. The agent's commands run in containers of ares_exp."""

        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            policy = RolloutEndpoint(endpoint, secret, ctx.model, request_timeout_sec)
            episode = await run.execute(data.name, policy)
            if episode is None:
                return vf.ProgramResult(exit_code=1, stdout="", stderr="The run ended before this episode had ended.")
            trace.state.episode_reward = episode.reward
            if episode.reward is not None:
                return vf.ProgramResult(exit_code=0, stdout=str(episode.result.outcome), stderr="")
            error = episode.result.error
            told = "no reward" if error is None else f"{error.type}: {error.message}"
            return vf.ProgramResult(exit_code=1, stdout="", stderr=told)

    class EpisodeEnv(vf.SingleAgentEnv):  # type: ignore[misc]
        """The environment, which keeps one run open while verifiers serves it."""

        async def start(self) -> None:
            await run.start()

        async def stop(self) -> None:
            await run.stop()

    return EpisodeTaskset, EpisodeHarness, EpisodeEnv


@dataclass(frozen=True)
class RolloutEndpoint:
    """A policy that sends requests to the endpoint of a verifiers rollout, with the API key `secret`."""

    url: str
    secret: str
    model: str
    timeout_sec: float

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Responds to one request.

        Raises:
            PolicyError: The endpoint sent no valid response.
        """
        body = request_to_body(request, model=self.model, strict=False, report=lambda _: None)
        limit = aiohttp.ClientTimeout(total=self.timeout_sec)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers={"Authorization": f"Bearer {self.secret}"}) as session,
                session.post(f"{self.url.rstrip('/')}/chat/completions", json={**body, "stream": False}) as response,
            ):
                if response.status != 200:
                    raise EndpointError(f"The endpoint returned {response.status}: {await response.text():.200}")
                read = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PolicyError(
                f"The endpoint of the rollout gave no response: {type(error).__name__}: {error}"
            ) from error
        return response_from_body(read, strict=False, report=lambda _: None)
