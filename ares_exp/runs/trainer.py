"""The interface between a run and its trainer, which chooses the episodes and learns from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ares_exp.policies.policy import Policy
from ares_exp.policies.waiting import Gate
from ares_exp.records.run_dir import RunDir
from ares_exp.runs.scheduler import Execute, PlannedEpisode, Retry, Scheduler, Slot

if TYPE_CHECKING:
    from ares_exp.environments.episode_limits import EpisodeLimits
    from ares_exp.runs.components import Components, Settings
    from ares_exp.runs.resume.session import PreviousSessions
    from ares_exp.runs.running_episode import RunningEpisode

OnEnd = Callable[["RunningEpisode | None"], None]
PauseScope = Literal["requests", "starts"]
TRAINER = "trainer"
"""Name that identifies pauses by the trainer, as opposed to pauses by a user."""
GRACE_SEC = 60.0
"""Maximum time, in seconds, that the run waits for an interrupted trainer to finish its current step."""

logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """A component that chooses and learns from a run's episodes. An interrupt cancels `train`, which must end soon."""

    def check(self, policy: Policy, task_names: Sequence[str]) -> None:
        """Checks that the trainer can train with this policy and these tasks. Runs before containers start. Blocking.

        Raises:
            UserError: Training is not possible. The message suggests a fix.
        """
        ...

    async def train(self, run: TrainedRun) -> None:
        """Trains until the training is complete. Requests episodes with `run.execute`.

        Raises:
            UserError: Training failed because of a problem that the user can fix. The run can be resumed.
        """
        ...


class TrainedRun:
    """The functions of a run that its trainer can use. Call them only on the event loop of the run.

    Attributes:
        task_names: Names of the selected tasks.
        seed: Seed of all random choices.
        earlier: Results and response logs of earlier sessions of the run.
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
        scheduler.on_drop = self._end  # for example, because a user cancelled the attempt

    @property
    def is_ending(self) -> bool:
        """Whether the run was interrupted, so that no more episodes start."""
        return self._scheduler.interrupted

    @property
    def concurrency(self) -> int:
        """The maximum number of concurrent episodes, which a user can change during the run."""
        return self._scheduler.concurrency

    def describe(self, task_name: str) -> Mapping[str, Any]:
        """Returns a description of a task as a mapping.

        If the source has no task objects, the mapping only contains the digest of the task's files, or nothing if the
        digest is unknown.
        """
        task = next((one for one in self._source.tasks if one.name == task_name), None)
        if task is not None:
            return task.describe()
        digest = self._source.digest(task_name)
        return {} if digest is None else {"digest": digest}

    def running(self) -> Mapping[Slot, RunningEpisode]:
        """Returns the running episodes, by the name of the task and the number of the attempt."""
        return {one.planned.slot: one for one in self._running()}

    def execute(self, planned: PlannedEpisode, on_end: OnEnd) -> None:
        """Adds an attempt to the queue. The run executes and records it when a slot is free.

        The attempt's task and number must be unique in the run. `on_end` is called once, when the attempt has a
        result, has failed without another retry, or was cancelled or interrupted. At that time, the row of the last
        episode is already written. The argument of `on_end` is this episode, or `None` if the attempt never started.
        """
        self._on_end[planned.slot] = on_end
        self._scheduler.append(planned)
        self._on_run()

    def cancel(self, slot: Slot) -> None:
        """Cancels an attempt. If it has not started yet, it will not start. Has no effect if the attempt has ended."""
        if slot in self._on_end and not self._scheduler.cancel(slot):  # the attempt is still in the queue
            self._end(slot)

    def pause(self, scope: PauseScope) -> None:
        """Pauses all requests to the policy (`requests`) or the start of episodes (`starts`) until `resume` is called.

        The time limits of episodes do not count the pause.
        """
        if scope == "requests":
            self._gate.close(TRAINER)
        else:
            self._scheduler.pause(TRAINER, "The trainer has paused the start of new episodes.")

    def resume(self, scope: PauseScope) -> None:
        """Ends a pause of the trainer. If a user has also paused the run, the run stays paused."""
        if scope == "requests":
            self._gate.open(TRAINER)
        else:
            self._scheduler.resume(TRAINER)

    # Methods for the run

    def tried(self, episode: RunningEpisode) -> None:
        """Stores an episode as its attempt's last episode so far. The row of the episode must have been written."""
        self._last[episode.planned.slot] = episode

    async def execute_try(self, planned: PlannedEpisode, execute: Execute) -> Retry | None:
        """Runs one episode with `execute`, unless the attempt was cancelled in the queue. Returns the next retry."""
        slot = planned.slot
        if slot not in self._on_end:
            return None
        retry = await execute(planned)
        if retry is not None and slot not in self._scheduler.cancelled:
            return retry
        self._end(slot)
        return None

    def _end(self, slot: Slot) -> None:
        """Calls `on_end` of an attempt, if it was not called before."""
        if (on_end := self._on_end.pop(slot, None)) is not None:
            on_end(self._last.pop(slot, None))


async def train(trainer: Trainer, run: TrainedRun, scheduler: Scheduler) -> None:
    """Runs a trainer and the attempts that it requests, until the trainer has finished or the run is interrupted.

    Raises:
        Exception: The error that the trainer raised.
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
