"""A process full of episodes: all of them finish, no result is lost, and finished episodes are freed."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.source import EpisodeParts
from ares_exp.records.run_dir import RunDir
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.benchmarks.bench_load import Tasks, Work, execute, experiment

EPISODES, AT_ONCE = 200, 100
THREADS = 32
"""As many as an event loop has at most. Each lets go of its last work a moment after who waited for that goes on."""


class Counted:
    """Counts the existing objects.

    Attributes:
        alive: The objects.
        most: The most that there were at a time.
    """

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def add(self, made: Any) -> Any:
        self.alive.add(made)
        self.most = max(self.most, len(self.alive))
        return made


class CountedTasks(Tasks):
    """Counts environments, and what their agents hold: the container is the last thing that they let go of."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.environments, self.containers = Counted(), Counted()

    def make(self, task_name: str, parts: EpisodeParts) -> CodeEnvironment:
        def counted(spec: ContainerSpec) -> Any:
            return self.containers.add(parts.container_factory(spec))

        environment = super().make(task_name, replace(parts, container_factory=counted))  # type: ignore[arg-type]
        self.environments.add(environment)
        return environment


@pytest.fixture
def without_garbage_collector() -> Iterator[None]:
    """Inside, only what nothing refers to is freed."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_garbage_collector")
async def test_hundreds_at_once_all_finish_and_are_freed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    tasks, policy = CountedTasks(EPISODES), Work(0.05, steps=(2, 6))
    summary = await execute(experiment(tasks, policy, AT_ONCE, run_dir), run_dir)
    assert summary.complete
    rows = [json.loads(line) for line in run_dir.episodes.read_text().splitlines()]
    assert {row["task_name"] for row in rows} == {f"task-{number}" for number in range(EPISODES)}
    assert len(rows) == EPISODES
    assert sum(row["num_steps"] for row in rows) == policy.steps
    assert list(run_dir.responses.iterdir()) == []
    kept = [EpisodeTrajectory.load(run_dir.trajectories / f"{row['episode_id']}.json") for row in rows]
    assert [len(one.steps) - 1 for one in kept] == [row["num_steps"] for row in rows]
    for counted in (tasks.environments, tasks.containers):
        assert len(counted.alive) == 0
        assert counted.most <= AT_ONCE + THREADS
