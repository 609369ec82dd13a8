"""The contract between a run and its trainer, which decides what is played and learns from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ares_exp.policies.policy import Policy
from ares_exp.records.run_dir import RunDir
from ares_exp.runs.resume.episode_plan import PlannedEpisode
from ares_exp.runs.resume.previous_sessions import PreviousSessions
from ares_exp.runs.running_episode import RunningEpisode

OnEnd = Callable[[RunningEpisode | None], None]


class TrainedRun(Protocol):
    """A run, as its trainer sees it. Used on the event loop of the run.

    Attributes:
        policy: The policy that answers.
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

    def play(self, planned: PlannedEpisode, on_end: OnEnd) -> None:
        """Has an attempt played as soon as a slot is free, and recorded as in any run.

        Args:
            planned: The attempt; no other of the run has its task and number.
            on_end: Called once, with the last try, when its row is written: after a result, an error that is not
                retried, `cancel` or an interrupt. With `None` for an attempt that was cancelled before it started.
        """
        ...

    def cancel(self, slot: tuple[str, int]) -> None:
        """Ends an attempt as cancelled; one that has not started is never played. Does nothing after its end."""
        ...

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Gives the trackers numbers of the training at an optimizer step."""
        ...

    def warn(self, sentence: str) -> None:
        """Warns the user once."""
        ...


class Trainer(Protocol):
    """Decides what a run plays, and learns from it: an option `trainer=` of the command `train`.

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


class NoTrainer(Trainer):
    """The trainer of an ordinary run: every task is run `attempts` times, and no policy learns."""

    def check(self, policy: Policy, task_names: Sequence[str]) -> None:
        """There is nothing to refuse."""

    async def train(self, run: TrainedRun) -> None:
        """There is nothing to learn."""


def trains(trainer: Trainer) -> bool:
    """Whether the trainer makes the plan of the run."""
    return not isinstance(trainer, NoTrainer)
