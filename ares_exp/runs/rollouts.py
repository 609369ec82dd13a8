"""`rollouts`: episodes played for a loop in Python, each handed over when it has finished; nothing is kept on disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.cancellation import finish
from ares_exp.records.results import EpisodeResult, EpisodeUsage, ErrorInfo, Outcome
from ares_exp.runs.components import Settings
from ares_exp.runs.episode_maker import EpisodeMaker
from ares_exp.runs.parts_given import MadeEnvironments, PartsGiven
from ares_exp.runs.preparation import bounded_concurrency, planned_episodes, prepare
from ares_exp.runs.resume.episode_plan import PlannedEpisode
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.trajectories.records import EpisodeTrajectory

if TYPE_CHECKING:
    from ares_exp.agents.code_agent import CodeAgentFactory
    from ares_exp.containers.container import ContainerFactory
    from ares_exp.environment import MinimalEnvironment
    from ares_exp.environments.source import EnvironmentSource
    from ares_exp.llms.request import LLMClient

RELEASE_LIMIT_SEC = 60.0
"""Seconds that cancelled episodes have to release their containers."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedEpisode:
    """An episode that has ended, with a reward or with an error.

    Attributes:
        result: Its row, as in the `episodes.jsonl` of a run.
        trajectory: Its steps; `None` when its environment could not be made.
        usage: Answers, tokens and cost of its policy.
    """

    result: EpisodeResult
    trajectory: EpisodeTrajectory | None
    usage: EpisodeUsage

    @property
    def task_name(self) -> str:
        """The task."""
        return self.result.task_name

    @property
    def attempt(self) -> int:
        """Number of this playing of the task, from 0."""
        return self.result.attempt

    @property
    def reward(self) -> float | None:
        """The episode's reward; `None` when there is none."""
        return self.result.reward

    @property
    def outcome(self) -> Outcome:
        """Its outcome."""
        return self.result.outcome

    @property
    def error(self) -> ErrorInfo | None:
        """What went wrong, or the limit that truncated it; `None` when it was completed."""
        return self.result.error


async def rollouts(
    *,
    env: EnvironmentSource | Callable[[], MinimalEnvironment] | str | Mapping[str, Any],
    policy: LLMClient | str | Mapping[str, Any],
    agent: CodeAgentFactory | str | Mapping[str, Any] | None = None,
    container: ContainerFactory | str | Mapping[str, Any] | None = None,
    attempts: int = 1,
    concurrency: int = 4,
    seed: int = 0,
    overrides: Sequence[str] = (),
    config_dirs: Sequence[str | Path] = (),
) -> AsyncGenerator[FinishedEpisode, None]:
    """Plays every task `attempts` times and yields each episode when it has finished, in that order.

    Plays on the event loop of the caller, `concurrency` episodes at once. One that has finished and was not taken yet
    is one of these, so that the loop gets no further ahead of its consumer; while the consumer works on an episode, the
    others go on. An error of an episode is its outcome, as in a run; nothing is retried.

    Leaving the loop early (`break`, an exception, cancellation, `aclose()`) cancels what is being played and releases
    every container. After `break` Python does that as soon as nothing refers to the generator; `async with
    contextlib.aclosing(rollouts(…)) as episodes:` waits for it.

    A part is an object, the name of an option (`policy="oracle"`), or the content of an option file
    (`{"_target_": "my_module.MyPolicy", "temperature": 0.7}`). Objects stay the caller's to close.

    Args:
        env: What is played: a source of tasks, or a function that makes an environment (it is called for each episode,
            and the environment's `reset` gets the episode's seed if it takes one).
        policy: Answers the requests; any `async` function of a request will do.
        agent: Factory of code agents; `None` for the default option.
        container: Factory of containers; `None` for the default option.
        attempts: Episodes for each task, numbered from 0; the attempts of a task differ in their seeds alone.
        concurrency: Episodes at once.
        seed: Seed of everything that is drawn; an episode has the same seed as in a run.
        overrides: Values of these parts, and limits of episodes, as on the command line: `["env.path=tasks",
            "policy.model=…", "limits.steps=20", "timeouts.agent=600"]`.
        config_dirs: Folders of options, as `--config-dir`.

    Yields:
        Finished episodes.

    Raises:
        UserError: When the first episode is asked for: something is wrong with the arguments, the tasks or the machine;
            no container was started.
    """
    given = PartsGiven(
        {"env": env, "policy": policy, "agent": agent, "container": container},
        {"attempts": attempts, "concurrency": concurrency, "seed": seed},
        overrides,
        [Path(folder) for folder in config_dirs],
    )
    parts, settings, owned = await asyncio.to_thread(given.make)
    maker, chooses_task = EpisodeMaker(parts, settings), isinstance(parts.source, MadeEnvironments)
    running: set[asyncio.Task[FinishedEpisode]] = set()
    finished: asyncio.Queue[asyncio.Task[FinishedEpisode]] = asyncio.Queue()
    at_once = settings.concurrency

    def hand_over(task: asyncio.Task[FinishedEpisode]) -> None:
        running.discard(task)
        finished.put_nowait(task)

    def fill(owed: Iterator[PlannedEpisode]) -> None:
        while len(running) + finished.qsize() < at_once and (planned := next(owed, None)) is not None:
            task = asyncio.create_task(_play(maker, planned, settings, chooses_task=chooses_task))
            running.add(task)
            task.add_done_callback(hand_over)

    try:
        names = await prepare(parts, settings, maker, logger.warning)
        at_once = bounded_concurrency(parts, settings.concurrency, logger.warning)
        owed = iter(planned_episodes(parts, settings, names))
        fill(owed)
        while running or finished.qsize():
            episode = (await finished.get()).result()
            fill(owed)  # before the consumer works on this one
            yield episode
    finally:
        await finish(_release(running, owned))


async def _play(
    maker: EpisodeMaker, planned: PlannedEpisode, settings: Settings, *, chooses_task: bool
) -> FinishedEpisode:
    """Plays one episode. Raises only `CancelledError`, when its task is cancelled.

    Args:
        maker: Makes its parts.
        planned: The episode.
        settings: Of all episodes.
        chooses_task: Whether the environment, not the plan, knows the task.
    """
    episode = RunningEpisode(planned=planned, limits=settings.limits)
    failure = await maker.run(episode)
    result, trajectory = episode.to_result(failure), episode.trajectory
    if chooses_task and (name := episode.report().task_name) is not None:
        result = replace(result, task_name=name)
        trajectory = trajectory and replace(trajectory, task_name=name)
    return FinishedEpisode(result, trajectory, episode.usage)


async def _release(running: set[asyncio.Task[FinishedEpisode]], owned: Sequence[Callable[[], Any]]) -> None:
    """Cancels what is being played, waits until it has released everything, and closes the parts made here."""
    tasks = {*running}
    for task in tasks:
        task.cancel()
    if tasks:
        _, stuck = await asyncio.wait(tasks, timeout=RELEASE_LIMIT_SEC)
        if stuck:
            logger.warning("%d cancelled episodes did not end within %g s.", len(stuck), RELEASE_LIMIT_SEC)
    for close in owned:
        try:
            await close()
        except Exception as error:
            logger.warning("A part of the rollouts could not be closed: %s: %s", type(error).__name__, error)
