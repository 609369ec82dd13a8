"""The contract between a run and its trainer. The trainer chooses the episodes and learns from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ares_exp.policies.policy import Policy
from ares_exp.policies.waiting import Gate
from ares_exp.records.run_dir import RunDir
from ares_exp.runs.scheduler import Execute, PlannedEpisode, Retry, Scheduler

if TYPE_CHECKING:
    from ares_exp.environments.episode_limits import EpisodeLimits
    from ares_exp.runs.components import Components, Settings
    from ares_exp.runs.resume.session import PreviousSessions
    from ares_exp.runs.running_episode import RunningEpisode

OnEnd = Callable[["RunningEpisode | None"], None]
Slot = tuple[str, int]
PauseScope = Literal["requests", "starts"]
TRAINER = "trainer"
"""Name under which a trainer pauses the run."""
GRACE_SEC = 60.0
"""Time limit, in seconds, for an interrupted trainer to finish its current step."""

logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """Chooses the episodes of a run and learns from them.

    If the run is interrupted, `train` is cancelled, and must then return soon.
    """

    def check(self, policy: Policy, task_names: Sequence[str]) -> None:
        """Checks that training is possible, before the first container starts. Blocking.

        Raises:
            UserError: Training is not possible. The message suggests a fix.
        """
        ...

    async def train(self, run: TrainedRun) -> None:
        """Trains until the training is complete.

        Raises:
            UserError: Training failed because of a problem that the user can fix. The run can be resumed.
        """
        ...


class TrainedRun:
    """The interface of a run for its trainer. Must be used on the event loop of the run.

    Attributes:
        task_names: Names of the selected tasks.
        seed: Seed of all random choices.
        earlier: Records of earlier sessions of the run.
    """

    def __init__(
        self,
        parts: Components,
        settings: Settings,
        run_dir: RunDir,
        scheduler: Scheduler,
        task_names: Sequence[str],
        earlier: PreviousSessions,
        on_run: Callable[[], None],
        running: Callable[[], Iterable[RunningEpisode]],
        gate: Gate,
    ) -> None:
        self._source = parts.source
        self.policy: Policy = parts.policy
        self.task_names = task_names
        self.agent_name = parts.effective_agent.name
        self.run_dir = run_dir
        self.seed = settings.seed
        self.limits: EpisodeLimits = settings.limits
        self.earlier = earlier
        self._scheduler = scheduler
        self._on_run = on_run
        self._running = running
        self._gate = gate
        self._on_end: dict[Slot, OnEnd] = {}
        self._last: dict[Slot, RunningEpisode] = {}
        self._tries: dict[Slot, asyncio.Task[Retry | None]] = {}
        self._cancelled: set[Slot] = set()

    @property
    def is_ending(self) -> bool:
        """Whether the run was interrupted."""
        return self._scheduler.interrupted

    @property
    def concurrency(self) -> int:
        """The maximum number of concurrent episodes, which a user can change during the run."""
        return self._scheduler.concurrency

    def describe(self, task_name: str) -> Mapping[str, Any]:
        """Returns the description of a task.

        If the source has no task objects, returns only the digest of the task; an empty mapping if the digest is
        unknown.
        """
        task = next((one for one in self._source.tasks if one.name == task_name), None)
        if task is not None:
            return task.describe()
        digest = self._source.digest(task_name)
        return {} if digest is None else {"digest": digest}

    def running(self) -> Mapping[Slot, RunningEpisode]:
        """Returns the running episodes by attempt."""
        return {one.planned.slot: one for one in self._running()}

    def execute(self, planned: PlannedEpisode, on_end: OnEnd) -> None:
        """Runs and records an attempt when a slot is available. Its slot (task and number) must be unique in the run.

        `on_end` is called once, when the row of the last episode is written: after a result, an error that is not
        retried, `cancel` or an interrupt. Its argument is the last episode, or `None` if the attempt never started.
        """
        self._on_end[planned.slot] = on_end
        self._scheduler.append(planned)
        self._on_run()

    def cancel(self, slot: Slot) -> None:
        """Cancels an attempt. If the attempt has not started, it is never run. Has no effect after its end."""
        if slot not in self._on_end:
            return
        self._cancelled.add(slot)
        if (running := self._tries.get(slot)) is not None:
            running.cancel()
        else:  # the attempt is still in the queue
            self._end(slot)

    def pause(self, scope: PauseScope) -> None:
        """Pauses requests to the policy or the start of episodes until `resume`. Time limits do not count the pause."""
        if scope == "requests":
            self._gate.close(TRAINER)
        else:
            self._scheduler.pause(TRAINER, "The trainer has paused the start of new episodes.")

    def resume(self, scope: PauseScope) -> None:
        """Ends a pause by the trainer. A pause that a user ordered continues."""
        if scope == "requests":
            self._gate.open(TRAINER)
        else:
            self._scheduler.resume(TRAINER)

    # Methods for the run

    def dropped(self, planned: PlannedEpisode) -> None:
        """Ends an attempt whose episode another component has removed from the queue."""
        if planned.slot in self._on_end:
            self._end(planned.slot)

    def is_cancelled(self, slot: Slot) -> bool:
        """Returns whether the trainer has cancelled an attempt that has not ended."""
        return slot in self._cancelled

    def tried(self, episode: RunningEpisode) -> None:
        """Stores an episode as the latest of its attempt, after the row of the episode was written."""
        self._last[episode.planned.slot] = episode

    async def execute_try(self, planned: PlannedEpisode, execute: Execute) -> Retry | None:
        """Runs one episode in a separate task, so that `cancel` can end it. Returns the next retry, if any."""
        slot, retry = planned.slot, None
        if slot in self._cancelled:
            self._cancelled.discard(slot)
            return None
        running = self._tries[slot] = asyncio.ensure_future(execute(planned))
        try:
            retry = await running
        except asyncio.CancelledError:
            if not (running.cancelled() and slot in self._cancelled):
                raise
        finally:
            del self._tries[slot]
        if retry is not None and slot not in self._cancelled:
            return retry
        self._cancelled.discard(slot)
        self._end(slot)
        return None

    def _end(self, slot: Slot) -> None:
        self._on_end.pop(slot)(self._last.pop(slot, None))


async def train(trainer: Trainer, run: TrainedRun, scheduler: Scheduler) -> None:
    """Runs a trainer and the attempts that it requests, until the trainer is done or the run is interrupted.

    Raises:
        Exception: The trainer raised this error.
    """
    training = asyncio.create_task(trainer.train(run))
    training.add_done_callback(lambda _: scheduler.end())
    try:
        await scheduler.run((), waits_for_more=True)
    finally:
        if not training.done():
            training.cancel()
            await asyncio.wait({training}, timeout=GRACE_SEC)
    if not training.done():
        logger.warning("The interrupted trainer did not end within %g s.", GRACE_SEC)
    elif scheduler.interrupted:
        training.cancelled() or training.exception()  # errors because of cancelled episodes are expected
    elif not training.cancelled():
        training.result()
