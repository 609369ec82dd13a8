"""The tasks that are to be checked, and what keeps those from being played that cannot be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ares_exp.agents.code_agent import as_agent_factory
from ares_exp.config.targets import instantiate_group
from ares_exp.containers.container import as_container_factory
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.harbor import check_task
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import ConfigError, TaskError
from ares_exp.tasks.harbor_task import load_task
from ares_exp.tasks.task_files import INSTRUCTION
from ares_exp.tasks.task_toml import TASK_TOML

if TYPE_CHECKING:
    from omegaconf import DictConfig

SIGNS = (TASK_TOML, INSTRUCTION, "tests/test.sh")
"""Files of which a task has at least one, however broken it is."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder that is to be a task.

    Attributes:
        path: The folder, as it was named.
        shared: The folder of tasks that was named, which links of the task may lead to; `None`: the task was named.
        problem: Why it cannot be played; `None` if it can.
    """

    path: Path
    shared: Path | None = None
    problem: str | None = None

    @property
    def name(self) -> str:
        """The name of the task."""
        return self.path.resolve().name


def find_candidates(paths: Sequence[Path]) -> list[Candidate]:
    """Finds the tasks at paths, each a task or a folder of tasks, and reads them.

    Tasks of a folder may share files in it only if it is the only path.

    Raises:
        ConfigError: A path is no folder, a folder has nothing like a task, or two tasks have one name.
    """
    folders = {folder.resolve(): folder for path in paths for folder in _folders(path.expanduser())}
    counted = Counter(real.name for real in folders)
    if twice := sorted(name for name, count in counted.items() if count > 1):
        raise ConfigError(f"Expected tasks with names of their own, but several are called {', '.join(twice)}.")
    only = paths[0].expanduser() if len(paths) == 1 else None
    return [_read(Candidate(folder, only if folder != only else None)) for folder in folders.values()]


def with_problems(candidates: Sequence[Candidate], config: DictConfig) -> list[Candidate]:
    """Notes what the containers and the agent of a config, and the oracle, have to object to each task.

    Raises:
        ConfigError: Their options are wrong.
    """
    containers = as_container_factory(instantiate_group(config, "container"))
    agents = as_agent_factory(instantiate_group(config, "agent"))
    parts = EpisodeParts(containers, agents, EpisodeLimits(), seed=0)
    return [one if one.problem is not None else _checked(one, parts) for one in candidates]


def _folders(path: Path) -> list[Path]:
    """A task, or the tasks in a folder of tasks."""
    if not path.is_dir():
        raise ConfigError(f"Expected a task or a folder of tasks, found no such folder: {path}.")
    if (path / TASK_TOML).exists():
        return [path]
    children = [child for child in sorted(path.iterdir()) if _looks_like_a_task(child)]
    if not children and not _looks_like_a_task(path):
        raise ConfigError(
            f"Expected a task or a folder of tasks, but neither {path} nor a folder in it has a {TASK_TOML}. "
            f"`ares-exp task new {path / 'my-task'}` makes one."
        )
    return [path] if _looks_like_a_task(path) else children


def _looks_like_a_task(folder: Path) -> bool:
    return folder.is_dir() and any((folder / sign).exists() for sign in SIGNS)


def _read(candidate: Candidate) -> Candidate:
    try:
        load_task(candidate.path, links_within=candidate.shared)
    except (TaskError, OSError) as error:
        return replace(candidate, problem=str(error))
    return candidate


def _checked(candidate: Candidate, parts: EpisodeParts) -> Candidate:
    """Checks a task for both runs: for one with its solution, and for one without, where the agent counts."""
    try:
        task = load_task(candidate.path, links_within=candidate.shared)
        for provide_solution in (False, True):
            check_task(task, replace(parts, provide_solution=provide_solution))
    except (TaskError, OSError) as error:
        return replace(candidate, problem=str(error))
    return candidate
