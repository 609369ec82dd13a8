"""Rounds of a training: the groups of attempts that an optimizer step learns from, and their record.

A round is recorded before it is run. If the training is killed, the next session continues the round. Finished attempts
still count, because they were sampled with the weights of the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.errors import UserError
from ares_exp.records.record_files import read_record
from ares_exp.records.run_dir import append_lines
from ares_exp.training.curriculum import Curriculum, ZeroStdGroups, teaches_nothing
from ares_exp.training.driver import DrivenEpisode, EpisodeDriver, Slot, Submission


@dataclass(frozen=True)
class Group:
    """Attempts at one task, which are compared with each other.

    Attributes:
        task_name: Name of the task.
        episodes: Finished attempts, sorted by number.
        is_trained: Whether the step learns from the group.
    """

    task_name: str
    episodes: tuple[DrivenEpisode, ...]
    is_trained: bool = True

    @property
    def rewards(self) -> list[float]:
        """The rewards of the attempts that have a reward."""
        return [episode.reward for episode in self.episodes if episode.reward is not None]


class TrainingRecord:
    """The file of a training: one JSON line for each round, evaluation and step."""

    def __init__(self, path: Path) -> None:
        """Reads the lines of earlier sessions."""
        self._path = path
        self._lines: list[dict[str, Any]] = [*_read(path)]

    def find(self, kind: str, **fields: Any) -> list[Mapping[str, Any]]:
        """Returns the lines of this kind that have these values."""
        return [
            line
            for line in self._lines
            if line.get("kind") == kind and all(line.get(name) == value for name, value in fields.items())
        ]

    def append(self, kind: str, **fields: Any) -> None:
        """Appends a line and syncs it to disk."""
        line = {"kind": kind, **fields}
        append_lines(self._path, line)
        self._lines.append(line)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the complete lines. Truncates an incomplete last line, which a killed process left."""
    with suppress(FileNotFoundError):
        content = read_record(path)
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        for text in whole.splitlines():
            line = json.loads(text)
            if isinstance(line, dict):
                yield line


@dataclass
class Rounds:
    """Runs the rounds of a training.

    Attributes:
        driver: Driver that runs the episodes.
        record: Record of the training.
        curriculum: Curriculum that draws the tasks.
        group_size: Number of attempts in a group.
        zero_std_groups: Treatment of groups whose attempts all have the same reward.
        max_refills: Maximum number of times that such groups are replaced in a round.
    """

    driver: EpisodeDriver
    record: TrainingRecord
    curriculum: Curriculum
    group_size: int = 8
    zero_std_groups: ZeroStdGroups = "keep"
    max_refills: int = 3
    _redone: set[tuple[int, int]] = field(default_factory=set)

    async def execute(self, step: int, num_groups: int) -> list[Group]:
        """Runs the groups of an optimizer step.

        Args:
            step: Number of the step that learns from the groups.
            num_groups: Number of groups.

        Returns:
            `num_groups` groups. Groups that are not trained on are at the end.

        Raises:
            UserError: No attempt has a reward, or the training has ended.
        """
        useful: list[Group] = []
        spare: list[Group] = []
        for part in range(1 + (self.max_refills if self.zero_std_groups == "refill" else 0)):
            for group in await self._execute_part(step, part, num_groups - len(useful)):
                self.curriculum.add(group.task_name, group.rewards)
                is_spare = self.zero_std_groups != "keep" and teaches_nothing(group.rewards)
                (spare if is_spare else useful).append(group)
            if len(useful) == num_groups:
                break
        left_out = [Group(one.task_name, one.episodes, is_trained=False) for one in spare]
        groups = [*useful, *left_out[: num_groups - len(useful)]]
        _refuse_failures(step, groups)
        return groups

    async def evaluate(self, step: int, task_names: Sequence[str], attempts: int) -> dict[str, float]:
        """Runs held-out tasks with the current weights. Returns the mean reward of each task, and of all attempts.

        Attempts without a reward are ignored. The result is empty if no attempt has a reward.
        """
        where = {"step": step, "version": self.driver.version}
        known = self.record.find("evaluation", **where)
        if known:
            submission = await self.driver.submit_again([_slot(one) for one in known[-1]["slots"]])
        else:
            submission = self.driver.submit(task_names, attempts)
            self.record.append("evaluation", **where, slots=submission.slots)
        rewards: dict[str, list[float]] = defaultdict(list)
        async for episode in submission:
            if episode.reward is not None:
                rewards[episode.result.task_name].append(episode.reward)
        all_rewards = [one for several in rewards.values() for one in several]
        means = {f"heldout/reward/{name}": sum(several) / len(several) for name, several in sorted(rewards.items())}
        return {"heldout/reward": sum(all_rewards) / len(all_rewards), **means} if all_rewards else {}

    async def _execute_part(self, step: int, part: int, num_groups: int) -> list[Group]:
        names = self.curriculum.draw(num_groups, step=step, part=part)
        submission = await self._submit(step, part, names)
        ended: dict[str, list[DrivenEpisode]] = defaultdict(list)
        async for episode in submission:
            ended[episode.result.task_name].append(episode)
        for several in ended.values():
            several.sort(key=lambda one: one.result.attempt)
        groups = []
        for name in names:
            group, ended[name] = ended[name][: self.group_size], ended[name][self.group_size :]
            groups.append(Group(name, tuple(group)))
        return groups

    async def _submit(self, step: int, part: int, names: Sequence[str]) -> Submission:
        """Submits the groups of these tasks. Continues the recorded attempts if a killed session had started them."""
        where = {"step": step, "part": part, "version": self.driver.version}
        known = self.record.find("round", **where, tasks=[*names])
        if known and (step, part) not in self._redone:
            self._redone.add((step, part))
            return await self.driver.submit_again([_slot(one) for one in known[-1]["slots"]])
        submission = self.driver.submit(names, self.group_size)
        self.record.append("round", **where, tasks=[*names], slots=submission.slots)
        return submission


def _slot(recorded: Any) -> Slot:
    task_name, attempt = recorded
    return str(task_name), int(attempt)


def _refuse_failures(step: int, groups: Sequence[Group]) -> None:
    """Rejects a round without any reward, because further rounds would also fail.

    Raises:
        UserError: No attempt has a reward.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    if any(group.rewards for group in groups):
        return
    errors = [episode.result.error for episode in episodes if episode.result.error is not None]
    first = f" The first one: {errors[0].type}: {errors[0].message}" if errors else ""
    raise UserError(
        f"Expected rewards for optimizer step {step + 1}, but none of the {len(episodes)} attempts has one.{first} "
        "Mend that, and resume the run."
    )
