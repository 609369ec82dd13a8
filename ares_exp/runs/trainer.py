"""The contract between a run and its trainer, which decides what is run and learns from it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ares_exp.policies.policy import Policy
from ares_exp.records.run_dir import RunDir
from ares_exp.runs.scheduler import Execute, PlannedEpisode, Retry, Scheduler

if TYPE_CHECKING:
    from ares_exp.runs.components import Components, Settings
    from ares_exp.runs.resume.session import PreviousSessions
    from ares_exp.runs.running_episode import RunningEpisode

OnEnd = Callable[["RunningEpisode | None"], None]
Slot = tuple[str, int]

logger = logging.getLogger(__name__)


class TrainedRun(Protocol):
    """A run, as its trainer sees it. Used on the event loop of the run.

    Attributes:
        policy: The policy that responses.
        task_names: The selected tasks.
        run_dir: Where the run writes.
        seed: Of everything that is drawn.
        concurrency: Maximum number of episodes at once.
        earlier: What earlier sessions of the run left.
    """

    policy: Policy
    task_names: Sequence[str]
    run_dir: RunDir
    seed: int
    concurrency: int
    earlier: PreviousSessions

    def execute(self, planned: PlannedEpisode, on_end: OnEnd) -> None:
        """Has an attempt run as soon as a slot is free, and recorded as in any run.

        Args:
            planned: The attempt; no other of the run has its task and number.
            on_end: Called once, with the last try, when its row is written: after a result, an error that is not
                retried, `cancel` or an interrupt. With `None` for an attempt that was cancelled before it started.
        """
        ...

    def cancel(self, slot: tuple[str, int]) -> None:
        """Ends an attempt as cancelled; one that has not started is never ran. Does nothing after its end."""
        ...

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Gives the trackers numbers of the training at an optimizer step."""
        ...

    def warn(self, sentence: str) -> None:
        """Warns the user once."""
        ...


class Trainer(Protocol):
    """Decides what a run runs, and learns from it: an option `trainer=` of the command `train`.

    `train` is cancelled when the run is interrupted, and has to return soon then.
    """

    def check(self, policy: Policy, task_names: Sequence[str]) -> None:
        """Refuses what cannot be trained, before the first container starts. Blocking.

        Raises:
            UserError: With the remedy.
        """
        ...

    async def train(self, run: TrainedRun) -> None:
        """Trains, until it is done.

        Raises:
            UserError: Something is wrong that the user can mend; the run can be resumed.
        """
        ...


class RunOnRequest(TrainedRun):
    """A `TrainedRun` on the scheduler of a run."""

    def __init__(
        self,
        parts: Components,
        settings: Settings,
        run_dir: RunDir,
        scheduler: Scheduler,
        task_names: Sequence[str],
        earlier: PreviousSessions,
        warn: Callable[[str], None],
        on_run: Callable[[], None],
    ) -> None:
        self.policy: Policy = parts.policy
        self.task_names = task_names
        self.run_dir = run_dir
        self.seed = settings.seed
        self.concurrency = settings.concurrency
        self.earlier = earlier
        self._tracker = parts.tracker
        self._scheduler = scheduler
        self._warn = warn
        self._on_run = on_run
        self._on_end: dict[Slot, OnEnd] = {}
        self._last: dict[Slot, RunningEpisode] = {}
        self._tries: dict[Slot, asyncio.Task[Retry | None]] = {}
        self._cancelled: set[Slot] = set()

    def execute(self, planned: PlannedEpisode, on_end: OnEnd) -> None:
        """Has an attempt run as soon as a slot is free."""
        self._on_end[planned.slot] = on_end
        self._scheduler.append(planned)
        self._on_run()

    def cancel(self, slot: Slot) -> None:
        """Ends an attempt as cancelled; one that has not started is never ran."""
        if slot not in self._on_end:
            return
        self._cancelled.add(slot)
        if (running := self._tries.get(slot)) is not None:
            running.cancel()
        else:  # it waits for its turn, and need not any more
            self._end(slot)

    def dropped(self, planned: PlannedEpisode) -> None:
        """Notes that somebody else has taken a try off the queue: its attempt has ended."""
        if planned.slot in self._on_end:
            self._end(planned.slot)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Gives the trackers numbers of the training."""
        self._tracker.log_training(values, step=step)

    def warn(self, sentence: str) -> None:
        """Warns the user once."""
        self._warn(sentence)

    def is_cancelled(self, slot: Slot) -> bool:
        """Whether the trainer has cancelled an attempt that has not ended."""
        return slot in self._cancelled

    def tried(self, episode: RunningEpisode) -> None:
        """Notes a try that has its row."""
        self._last[episode.planned.slot] = episode

    async def execute_try(self, planned: PlannedEpisode, execute: Execute) -> Retry | None:
        """Runs one try of an attempt in a task of its own, which `cancel` ends; returns the retry, if one is due."""
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


async def train(trainer: Trainer, run: RunOnRequest, scheduler: Scheduler, *, limit_sec: float) -> None:
    """Has a trainer train, and what it asks for run, until it is done or the run is interrupted.

    Raises:
        Exception: What the trainer raised.
    """
    training = asyncio.create_task(trainer.train(run))
    training.add_done_callback(lambda _: scheduler.end())
    try:
        await scheduler.run((), waits_for_more=True)
    finally:
        if not training.done():
            training.cancel()
            await asyncio.wait({training}, timeout=limit_sec)
    if not training.done():
        logger.warning("The interrupted trainer did not end within %g s.", limit_sec)
    elif scheduler.interrupted:
        training.cancelled() or training.exception()  # whatever it says of episodes that were cancelled is no news
    elif not training.cancelled():
        training.result()
