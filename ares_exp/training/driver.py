"""The driver: a trainer submits tasks, and takes the episodes as they finish.

Everything that is run for one training lies in one run directory, as episodes of a run do: an attempt at a task has
a number of its own, whenever it is run. Containers belong to episodes, not to versions of weights: an `update`
restarts none.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from ares_exp.errors import ConfigError, TrajectoryFormatError, UserError, close_matches
from ares_exp.policies.policy import UpdatablePolicy, Weights
from ares_exp.records.results import EpisodeResult, final_results
from ares_exp.runs.running_episode import RunningEpisode
from ares_exp.runs.scheduler import PlannedEpisode, plan_attempt
from ares_exp.runs.trainer import TrainedRun
from ares_exp.trajectories.records import EpisodeTrajectory

CANCEL_LIMIT_SEC = 60.0
"""Seconds that cancelled episodes have to release their containers."""

Slot = tuple[str, int]
Condition = Callable[[], bool]
SlotEnd = Callable[[Slot, "DrivenEpisode | None"], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DrivenEpisode:
    """An attempt that has ended, with a reward or with an error.

    Attributes:
        result: Its row.
        trajectory: Its steps; `None` when no collector could keep them.
        versions: Versions of the weights that answered, in order, each once.
        staleness: How many versions behind the present one its oldest answer was, when the episode had finished.
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
        """Its task, and the number of the attempt."""
        return self.result.task_name, self.result.attempt

    @property
    def reward(self) -> float | None:
        """The reward; `None` when there is none."""
        return self.result.reward


@dataclass
class Staleness:
    """Staleness of episodes: how many versions of the weights behind they were, of those taken and those refused.

    Attributes:
        episodes: Number of episodes that finished.
        behind: Sum of their versions behind.
        most: The most versions that one was behind.
        refused: Number of those that were further behind than allowed, and are run again as new attempts.
    """

    episodes: int = 0
    behind: int = 0
    most: int = 0
    refused: int = 0

    def add(self, staleness: int) -> None:
        """Counts an episode."""
        self.episodes += 1
        self.behind += staleness
        self.most = max(self.most, staleness)

    @property
    def mean(self) -> float:
        """Mean number of versions behind."""
        return self.behind / self.episodes if self.episodes else 0.0


class Submission(AsyncIterator[DrivenEpisode]):
    """Attempts that were submitted together: an iterator over them as they finish.

    An attempt that has finished and was not taken holds its place: of one submission no more than `concurrency` are
    in progress or wait to be taken, so that running gets no further ahead of who takes. What one submission holds back
    delays no other.

    Attributes:
        slots: Task and number of every attempt, in the order in which they are started; one that is run in the place
            of a stale one is appended.
    """

    def __init__(self, driver: EpisodeDriver, planned: Sequence[PlannedEpisode]) -> None:
        """Starts as many as there are places for."""
        self.slots: list[Slot] = [one.slot for one in planned]
        self._driver = driver
        self._waiting = deque(planned)
        self._in_progress: set[Slot] = set()
        self._finished: asyncio.Queue[DrivenEpisode | None] = asyncio.Queue()
        self._cancelled = False
        self._start()

    @property
    def pending(self) -> int:
        """Number of attempts that were not taken yet."""
        return len(self._waiting) + len(self._in_progress) + self._finished.qsize()

    def __aiter__(self) -> Self:
        """Returns itself."""
        return self

    async def __anext__(self) -> DrivenEpisode:
        """Returns the next episode that has finished, and starts another in its place."""
        if self._cancelled or not self.pending:
            raise StopAsyncIteration
        episode = await self._finished.get()
        if episode is None:
            raise StopAsyncIteration
        self._start()
        return episode

    def give(self, episode: DrivenEpisode) -> None:
        """Hands over an episode that has ended before."""
        self._finished.put_nowait(episode)

    async def cancel(self) -> None:
        """Ends what is running as cancelled, and releases its containers; starts nothing more. Idempotent."""
        self._cancelled = True
        self._waiting.clear()
        for slot in [*self._in_progress]:  # what has not started ends at once
            self._driver.run.cancel(slot)
        self._finished.put_nowait(None)  # who waits for an episode need not wait any more
        await self._driver.wait_for(lambda: not self._in_progress)

    def _start(self) -> None:
        while self._waiting and len(self._in_progress) + self._finished.qsize() < self._driver.run.concurrency:
            planned = self._waiting.popleft()
            self._in_progress.add(planned.slot)
            self._driver.execute(planned, self._end)

    def _end(self, slot: Slot, episode: DrivenEpisode | None) -> None:
        """Takes an episode from the driver; `None`: it was refused, or never started."""
        self._in_progress.discard(slot)
        if self._cancelled:
            return
        if episode is not None:
            self._finished.put_nowait(episode)
        else:
            again = self._driver.plan(slot[0])
            self.slots.append(again.slot)
            self._waiting.append(again)
            self._start()


class EpisodeDriver:
    """Runs what a trainer submits, and tells the policy of new weights. Used on the event loop of the run.

    Attributes:
        run: The run that everything is recorded in.
        version: Of the weights that response now.
        staleness: How far behind the weights the episodes were.
    """

    def __init__(self, run: TrainedRun, *, version: str | None = None, max_staleness: int | None = None) -> None:
        """Runs nothing yet.

        Args:
            run: The run.
            version: Of the policy's weights; `None`: what the policy says, `"0"` if nothing.
            max_staleness: How many versions an episode's oldest answer may be behind when it has finished: one that is
                further behind is recorded, and another attempt is run in its place. `None`: any.
        """
        self.run = run
        self.staleness = Staleness()
        self._max_staleness = max_staleness
        policy = run.policy
        known = policy.policy_version if isinstance(policy, UpdatablePolicy) else None
        self.version = version or known or "0"
        self._age: dict[str, int] = {self.version: 0}
        self._changed = asyncio.Event()
        self._open: set[Submission] = set()
        self._closed = False
        results, logs = run.earlier.results, run.earlier.logs
        self._numbers: dict[str, int] = {}
        for task_name, attempt in [*((one.task_name, one.attempt) for one in results), *logs]:
            self._numbers[task_name] = max(self._numbers.get(task_name, 0), attempt + 1)
        self._results = {(one.task_name, one.attempt): one for one in final_results(results)}

    def submit(self, task_names: Sequence[str], n: int = 1) -> Submission:
        """Has `n` new attempts run at each of the tasks, those of a task one after the other.

        Raises:
            ConfigError: There is no such task in the run.
            UserError: The driver is closed.
        """
        if n < 1:
            raise ConfigError(f"Expected a number of attempts of at least 1, got {n}.")
        return self._submitted([self.plan(name) for name in task_names for _ in range(n)])

    async def submit_again(self, slots: Sequence[Slot]) -> Submission:
        """Submits attempts of an earlier session: finished ones are handed over, those in progress are continued."""
        finished, owed = [], []
        for slot in slots:
            planned = plan_attempt(*slot, seed=self.run.seed)
            self._check(slot[0])
            self._numbers[slot[0]] = max(self._numbers.get(slot[0], 0), slot[1] + 1)
            due = self.run.earlier.owed([planned], run_seed=self.run.seed)
            episode = await asyncio.to_thread(self._recorded, slot) if not due else None
            if episode is not None:
                finished.append(episode)
            else:
                owed += due or [planned.anew(retry=self._results[slot].retry + 1, seed=planned.seed)]
        submission = self._submitted(owed)
        for episode in finished:
            submission.give(episode)
        return submission

    async def update(self, version: str, weights: Weights | None = None) -> None:
        """Tells the policy of new weights, and returns when they answer. Episodes and their containers go on.

        Args:
            version: Name of the weights; no earlier ones of this training had it.
            weights: As for `UpdatablePolicy.update`.

        Raises:
            ConfigError: The policy takes no weights, or had weights of that name.
            PolicyError: They could not be taken.
        """
        policy = self.run.policy
        if not isinstance(policy, UpdatablePolicy):
            raise ConfigError(
                f"Expected a policy whose weights can be changed, got {type(policy).__name__}, which has no `update`: "
                "`policy=transformers`."
            )
        if version in self._age:
            raise ConfigError(f"Expected a new name for new weights, got {version!r}, which others of them had.")
        await policy.update(version, weights)
        self._age[version] = len(self._age)
        self.version = version

    async def close(self) -> None:
        """Cancels what is running, and waits until it has released everything. Idempotent."""
        self._closed = True
        await asyncio.gather(*(submission.cancel() for submission in [*self._open]))
        self._open.clear()

    async def __aenter__(self) -> Self:
        """Returns itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes it."""
        await self.close()

    def plan(self, task_name: str) -> PlannedEpisode:
        """Plans the next attempt at a task. Raises `ConfigError` when the run has no such task."""
        self._check(task_name)
        number = self._numbers.get(task_name, 0)
        self._numbers[task_name] = number + 1
        return plan_attempt(task_name, number, seed=self.run.seed)

    def execute(self, planned: PlannedEpisode, end: SlotEnd) -> None:
        """Has an attempt of a submission run."""

        def on_end(episode: RunningEpisode | None) -> None:
            end(planned.slot, None if episode is None else self._judged(episode))
            self._changed.set()

        self.run.execute(planned, on_end)

    async def wait_for(self, condition: Condition) -> None:
        """Waits until something is so that changes when an attempt ends, for `CANCEL_LIMIT_SEC` at most."""
        try:
            async with asyncio.timeout(CANCEL_LIMIT_SEC):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            logger.warning("Cancelled episodes did not end within %g s.", CANCEL_LIMIT_SEC)

    def _submitted(self, planned: Sequence[PlannedEpisode]) -> Submission:
        if self._closed:
            raise UserError("The training has ended, or was interrupted: nothing more is run. Resume its run.")
        self._open = {one for one in self._open if one.pending}
        submission = Submission(self, planned)
        self._open.add(submission)
        return submission

    def _check(self, task_name: str) -> None:
        if task_name not in self.run.task_names:
            close = close_matches(task_name, self.run.task_names)
            raise ConfigError(f"There is no task {task_name!r} in this run.{close}")

    def _judged(self, episode: RunningEpisode) -> DrivenEpisode | None:
        """Returns the episode; `None` when it is staler than allowed."""
        assert episode.result is not None
        driven = self._driven(episode.result, episode.trajectory)
        self.staleness.add(driven.staleness)
        if self._max_staleness is not None and driven.staleness > self._max_staleness:
            self.staleness.refused += 1
            return None
        return driven

    def _driven(self, result: EpisodeResult, trajectory: EpisodeTrajectory | None) -> DrivenEpisode:
        versions = versions_of(trajectory)
        newest = self._age[self.version]
        oldest = min((self._age.get(version, -1) for version in versions), default=newest)
        return DrivenEpisode(result, trajectory, versions, newest - oldest)

    def _recorded(self, slot: Slot) -> DrivenEpisode | None:
        """Returns an episode of an earlier session with its trajectory; `None` when that cannot be read. Blocking."""
        from ares_exp.trajectories.stored_episodes import load

        result = self._results[slot]
        try:
            found = load(self.run.run_dir.path, skip_broken=True)
            stored = next((one for one in found if one.episode_id == result.episode_id), None)
            return None if stored is None else self._driven(result, stored.load())
        except TrajectoryFormatError as error:
            logger.info("The trajectory of %s cannot be read: %s", result.episode_id, error)
            return None


def versions_of(trajectory: EpisodeTrajectory | None) -> tuple[str, ...]:
    """Returns the versions of the weights that answered in an episode, in order, each once."""
    actions = (step.action for step in (trajectory.steps if trajectory is not None else ()))
    named = (action.get("policy_version") for action in actions if action is not None)
    return tuple(dict.fromkeys(str(version) for version in named if version is not None))
