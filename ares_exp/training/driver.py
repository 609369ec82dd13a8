"""The episode driver: a trainer submits tasks to it, and receives the episodes as they finish.

All episodes of a trainer are in one run directory, as for other runs. Each attempt at a task has its own number. Each
episode keeps its container until it ends, even if the weights are updated meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ares_exp.cancellation import finish, happened
from ares_exp.errors import ConfigError, TrajectoryFormatError, UserError, close_matches
from ares_exp.llms.request import LLMClient
from ares_exp.policies.policy import Policy, UpdatablePolicy, Weights, as_policy
from ares_exp.records.results import EpisodeResult, final_results
from ares_exp.runs.from_python import checked_overrides, only_run
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import PlannedEpisode, Slot, plan_attempt
from ares_exp.runs.trainer import TrainedRun
from ares_exp.training.sampled_calls import distinct_versions
from ares_exp.trajectories.records import EpisodeTrajectory

CANCEL_LIMIT_SEC = 60.0
"""Maximum time in seconds to wait until cancelled episodes have released their containers."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrivenEpisode:
    """The episode of a finished attempt, with a reward or an error.

    Attributes:
        result: The episode's recorded result.
        trajectory: Steps of the episode; `None` if they were not recorded.
        versions: Versions of the weights that generated the responses, without repetitions, in order of first use.
        staleness: Number of versions by which the oldest response was behind the weights at the episode's end.
    """

    result: EpisodeResult
    trajectory: EpisodeTrajectory | None
    versions: tuple[str, ...] = ()
    staleness: int = 0

    def __repr__(self) -> str:
        row = self.result
        return f"DrivenEpisode({row.episode_id!r}, {row.outcome.value}, reward={row.reward}, versions={self.versions})"

    @property
    def slot(self) -> Slot:
        """The name of the task and the number of the attempt."""
        return self.result.task_name, self.result.attempt

    @property
    def reward(self) -> float | None:
        """The reward; `None` if the episode has no reward."""
        return self.result.reward


@dataclass
class Staleness:
    """Statistics of the staleness of finished episodes, including episodes that were too stale.

    The staleness of an episode is the number of versions by which its oldest response is behind the current weights.

    Attributes:
        episodes: Number of finished episodes.
        behind: Sum of the staleness of all episodes.
        most: Largest staleness of an episode.
        refused: Number of episodes that were too stale. A new attempt replaces each of them.
    """

    episodes: int = 0
    behind: int = 0
    most: int = 0
    refused: int = 0

    def add(self, staleness: int) -> None:
        """Adds the staleness of an episode."""
        self.episodes += 1
        self.behind += staleness
        self.most = max(self.most, staleness)

    @property
    def mean(self) -> float:
        """The mean staleness of the episodes; 0.0 if there are no episodes."""
        return self.behind / self.episodes if self.episodes else 0.0


class Submission(AsyncIterator[DrivenEpisode]):
    """Attempts that were submitted together. Iterate over it to receive their episodes in the order they finish.

    At most `concurrency` attempts are in progress: running, or finished but not yet received by the consumer. A slow
    consumer therefore slows down its own submission, but no other submission.

    Attributes:
        slots: Task and number of every attempt, in the order in which they start. Replacements of stale attempts are
            appended.
    """

    def __init__(
        self, driver: EpisodeDriver, planned: Sequence[PlannedEpisode], finished: Sequence[DrivenEpisode] = ()
    ) -> None:
        """Starts up to `concurrency` of the planned attempts. The consumer first receives the `finished` episodes."""
        self.slots: list[Slot] = [one.slot for one in planned]
        self._driver = driver
        self._waiting = deque(planned)
        self._in_progress: set[Slot] = set()
        self._finished: asyncio.Queue[DrivenEpisode | None] = asyncio.Queue()
        for episode in finished:
            self._finished.put_nowait(episode)
        self._cancelled = False
        self._released = asyncio.Event()
        self._start()

    @property
    def pending(self) -> int:
        """The number of attempts whose episode the consumer has not yet received."""
        return len(self._waiting) + len(self._in_progress) + self._finished.qsize()

    async def __anext__(self) -> DrivenEpisode:
        """Waits for the next finished episode, and returns it. Starts the next attempt, if any is waiting."""
        if self._cancelled or not self.pending:
            raise StopAsyncIteration
        episode = await self._finished.get()
        if episode is None:
            raise StopAsyncIteration
        self._start()
        return episode

    async def cancel(self) -> None:
        """Cancels all running attempts, releases their containers, and starts no further attempts. Idempotent."""
        self._cancelled = True
        self._waiting.clear()
        for slot in [*self._in_progress]:  # attempts that have not started end immediately
            self._driver.run.cancel(slot)
        self._finished.put_nowait(None)  # wakes up a consumer that is waiting for an episode
        if self._in_progress and not await happened(self._released, CANCEL_LIMIT_SEC):
            logger.warning("Cancelled episodes did not end within %g s.", CANCEL_LIMIT_SEC)

    def _start(self) -> None:
        while self._waiting and len(self._in_progress) + self._finished.qsize() < self._driver.run.concurrency:
            planned = self._waiting.popleft()
            self._in_progress.add(planned.slot)
            self._driver.execute(planned, self._end)

    def _end(self, slot: Slot, episode: DrivenEpisode | None) -> None:
        """Receives a finished episode. If `episode` is `None` (too stale or never started), plans another attempt."""
        self._in_progress.discard(slot)
        if self._cancelled:
            if not self._in_progress:
                self._released.set()
        elif episode is not None:
            self._finished.put_nowait(episode)
        else:
            again = self._driver.plan(slot[0])
            self.slots.append(again.slot)
            self._waiting.append(again)
            self._start()


class EpisodeDriver:
    """Runs the attempts that a trainer submits, and updates the weights of the policy.

    Use it only on the event loop of the run.

    Attributes:
        run: The run that records the episodes.
        version: Version of the current weights: at first the version that the policy reports, or `"0"`.
        staleness: Statistics of the staleness of finished episodes.
    """

    def __init__(self, run: TrainedRun, *, max_staleness: int | None = None) -> None:
        """Creates a driver without submissions.

        Args:
            run: The run that records the episodes.
            max_staleness: Maximum staleness of an episode (see `Staleness`). An episode that exceeds it is recorded
                but not returned, and another attempt replaces it. `None` means no limit.
        """
        self.run = run
        self.staleness = Staleness()
        self._max_staleness = max_staleness
        policy = run.policy
        known = policy.policy_version if isinstance(policy, UpdatablePolicy) else None
        self.version = known or "0"
        self._age: dict[str, int] = {self.version: 0}
        self._open: set[Submission] = set()
        self._closed = False
        results, logs = run.earlier.results, run.earlier.logs
        self._numbers: dict[str, int] = {}
        for task_name, attempt in [*((one.task_name, one.attempt) for one in results), *logs]:
            self._numbers[task_name] = max(self._numbers.get(task_name, 0), attempt + 1)
        self._results = {(one.task_name, one.attempt): one for one in final_results(results)}

    def submit(self, task_names: Sequence[str], n: int = 1) -> Submission:
        """Submits `n` new attempts at each task, in the order of the tasks.

        Raises:
            ConfigError: The run has no task with this name, or `n` is less than 1.
            UserError: The driver is closed.
        """
        if n < 1:
            raise ConfigError(f"Expected at least 1 attempt per task, got {n}.")
        return self._submitted([self.plan(name) for name in task_names for _ in range(n)])

    async def submit_again(self, slots: Sequence[Slot]) -> Submission:
        """Submits attempts that an earlier session of the run submitted (`Submission.slots`).

        Episodes of finished attempts are read from the run directory. The other attempts continue.

        Raises:
            ConfigError: The run has no task with this name.
            UserError: The driver is closed.
        """
        found = [await self.plan_again(slot) for slot in slots]
        planned = [one for one in found if isinstance(one, PlannedEpisode)]
        return self._submitted(planned, [one for one in found if isinstance(one, DrivenEpisode)])

    async def plan_again(self, slot: Slot, *, seed: int | None = None) -> PlannedEpisode | DrivenEpisode:
        """Plans an attempt of an earlier session, or returns its recorded episode if it is finished.

        Args:
            slot: Task and number of the attempt. New attempts at this task get larger numbers.
            seed: Seed of the attempt if it has not started; `None` derives it from the run's seed.

        Raises:
            ConfigError: The run has no task with this name.
        """
        self.check(slot[0])
        planned = plan_attempt(*slot, seed=self.run.seed)
        planned = planned if seed is None else replace(planned, seed=seed)
        self._numbers[slot[0]] = max(self._numbers.get(slot[0], 0), slot[1] + 1)
        if due := self.run.earlier.owed([planned], run_seed=self.run.seed):
            return due[0]
        if (episode := await asyncio.to_thread(self._recorded, slot)) is not None:
            return episode
        retry = self._results[slot].retry + 1
        if (log := self.run.earlier.ended.get(slot)) is not None:
            return planned.going_on(log, retry=retry)
        return planned.anew(retry=retry, seed=planned.seed)

    async def update(self, version: str, weights: Weights | None = None) -> None:
        """Updates the weights of the policy, and returns when they are in use. Running episodes continue.

        Args:
            version: Name of the weights. It must be new in this run.
            weights: The new weights, as for `UpdatablePolicy.update`.

        Raises:
            ConfigError: The policy has no `update`, or the name was used before.
            PolicyError: The policy could not load the weights.
        """
        policy = self.run.policy
        if not isinstance(policy, UpdatablePolicy):
            raise ConfigError(
                f"The weights of {type(policy).__name__} cannot be changed, because it has no `update`. "
                "Use another policy, such as `policy=transformers`."
            )
        if version in self._age:
            raise ConfigError(f"Expected a new version for new weights, but other weights already have {version!r}.")
        await policy.update(version, weights)
        self._age[version] = len(self._age)
        self.version = version

    async def close(self) -> None:
        """Cancels all submissions and waits for their containers, for at most `CANCEL_LIMIT_SEC`. Idempotent."""
        self._closed = True
        await asyncio.gather(*(submission.cancel() for submission in [*self._open]))
        self._open.clear()

    def plan(self, task_name: str) -> PlannedEpisode:
        """Plans a new attempt at a task, with the next unused number.

        Raises:
            ConfigError: The run has no task with this name.
        """
        self.check(task_name)
        number = self._numbers.get(task_name, 0)
        self._numbers[task_name] = number + 1
        return plan_attempt(task_name, number, seed=self.run.seed)

    def execute(self, planned: PlannedEpisode, end: Callable[[Slot, DrivenEpisode | None], None]) -> None:
        """Starts an attempt, and calls `end` when it has ended.

        `end` receives the slot and the episode. The episode is `None` if it is too stale or was never started.
        """
        self.run.execute(planned, lambda one: end(planned.slot, None if one is None else self._judged(one)))

    def _submitted(self, planned: Sequence[PlannedEpisode], finished: Sequence[DrivenEpisode] = ()) -> Submission:
        if self._closed:
            raise UserError("Training has ended or was interrupted, so it runs no more episodes. Resume the run.")
        self._open = {one for one in self._open if one.pending}
        submission = Submission(self, planned, finished)
        self._open.add(submission)
        return submission

    def check(self, task_name: str) -> None:
        """Raises `ConfigError` if the run has no task with this name."""
        if task_name not in self.run.task_names:
            close = close_matches(task_name, self.run.task_names)
            raise ConfigError(f"There is no task {task_name!r} in this run.{close}")

    def _judged(self, episode: RunningEpisode) -> DrivenEpisode | None:
        """Counts the staleness of a finished episode, and returns the episode; `None` if it is too stale."""
        assert episode.result is not None
        driven = self._driven(episode.result, episode.trajectory)
        self.staleness.add(driven.staleness)
        if self._max_staleness is not None and driven.staleness > self._max_staleness:
            self.staleness.refused += 1
            return None
        return driven

    def _driven(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None) -> DrivenEpisode:
        actions = (step.action for step in (trajectory.steps if trajectory is not None else ()))
        versions = distinct_versions(action.get("policy_version") for action in actions if action is not None)
        newest = self._age[self.version]
        oldest = min((self._age.get(version, -1) for version in versions), default=newest)
        return DrivenEpisode(result, trajectory, versions, newest - oldest)

    def _recorded(self, slot: Slot) -> DrivenEpisode | None:
        """Reads an episode of an earlier session from disk. Returns `None` if its trajectory is not complete."""
        from ares_exp.trajectories.stored_episodes import load

        result = self._results[slot]
        try:
            found = load(self.run.run_dir.path, skip_broken=True)
            whole = (result.episode_id, result.outcome)
            stored = next((one for one in found if (one.episode_id, one.outcome) == whole), None)
            return None if stored is None else self._driven(result, stored.load())
        except TrajectoryFormatError as error:
            logger.info("The trajectory of %s cannot be read: %s", result.episode_id, error)
            return None


@asynccontextmanager
async def driven(
    overrides: Sequence[str] = (),
    *,
    policy: LLMClient | None = None,
    max_staleness: int | None = None,
    config_dirs: Sequence[str | Path] = (),
    quiet: bool = True,
) -> AsyncIterator[EpisodeDriver]:
    """Starts a run, or resumes a run (`resume=outputs/first`), and yields a driver to which you submit episodes.

    ```
    async with ares_exp.driven(["env=harbor", "agent=tools"], policy=my_policy) as driver:
        async for episode in driver.submit(["hello-world"], n=8):
            learn_from(episode)
        await driver.update("1")
    ```

    When the body of the `with` statement ends or raises an exception, running episodes are cancelled, all containers
    are released, and the run is closed. The run uses the event loop of the caller.

    Args:
        overrides: Overrides as on the command line. `attempts` has no effect, because `submit` sets the number.
        policy: Policy to use instead of an option of the group `policy`. It is closed at the end of the run.
        max_staleness: Maximum staleness of an episode, as for `EpisodeDriver`.
        config_dirs: Folders of options, as for `--config-dir`.
        quiet: Whether to suppress the progress and the summary.

    Yields:
        The driver.

    Raises:
        UserError: The overrides are invalid, or a component of the run cannot be used. No container was started.
    """
    from ares_exp.runs.composing import compose_run, run_log

    folders = [Path(folder) for folder in config_dirs]
    body = Body(max_staleness)
    given: dict[str, Any] = {"trainer": body}
    if policy is not None:
        given["policy"] = as_policy(policy)
    with only_run():
        run = await asyncio.to_thread(compose_run, checked_overrides(overrides), folders, quiet=quiet, given=given)
        with run_log(run.log_config, overrides):
            running: asyncio.Task[Any] = asyncio.create_task(run.execute())
            try:
                await asyncio.wait({running, body.driver}, return_when=asyncio.FIRST_COMPLETED)
                if not body.driver.done():
                    await running
                    raise UserError("The run was interrupted before it started.")
                yield body.driver.result()
            except UserError:
                run.run_dir.discard()
                raise
            finally:
                body.ended.set()
                await finish(asyncio.wait({running}))
            running.result()


class Body:
    """The trainer of a run from `driven`. It creates a driver, and closes it when the caller's `with` body ends."""

    def __init__(self, max_staleness: int | None) -> None:
        self.driver: asyncio.Future[EpisodeDriver] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self._max_staleness = max_staleness

    def check(self, policy: Policy, task_names: Sequence[str]) -> None:
        """Accepts every policy and every task."""

    async def train(self, run: TrainedRun) -> None:
        """Provides a driver to the body of the `with` statement, and waits until the body ends."""
        driver = EpisodeDriver(run, max_staleness=self._max_staleness)
        self.driver.set_result(driver)
        try:
            await self.ended.wait()
        finally:
            await driver.close()
