"""What a snapshot's episode was set up with: its container, its agent and its task, as recorded."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.agents.code_agent import CodeAgentFactory
from ares_exp.containers.container import ContainerFactory
from ares_exp.environments.episode_facts import EpisodeFacts
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.episode_setup import EpisodeSetup
from ares_exp.errors import (
    ConfigError,
    SnapshotMetadataError,
    SnapshotMismatchError,
    SnapshotUnsupportedError,
    TaskError,
    UnsafeSnapshotError,
)
from ares_exp.tasks.task import Task

if TYPE_CHECKING:
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot

_FACTORIES = {
    "daytona": ("ares_exp.containers.daytona", "DaytonaContainerFactory"),
    "docker": ("ares_exp.containers.docker", "DockerContainerFactory"),
    "local": ("ares_exp.containers.local", "LocalContainerFactory"),
    "ares_exp.agents.shell_agent.ShellAgentFactory": ("ares_exp.agents.shell_agent", "ShellAgentFactory"),
}

_REACHING_OPTIONS = ("network", "allowed_hosts", "extra_hosts", "snapshot")
"""What lets a container reach, or begin with, more than its task says: networks, a snapshot in our account."""


def recorded_setup(
    snapshot: EnvironmentSnapshot,
    container_factory: ContainerFactory | None,
    code_agent_factory: CodeAgentFactory | None,
    limits: EpisodeLimits | None,
    output_dir: Path | None,
    *,
    is_task_given: bool,
) -> EpisodeSetup:
    """What an episode is to be set up with: what is given, and as recorded what is not.

    A file decides nothing that reaches this machine: a network, and variables for a task's solution, have to be given.

    Raises:
        SnapshotUnsupportedError: The container, the agent or the task has to be given.
        SnapshotMetadataError: What is recorded makes none.
    """
    facts = EpisodeFacts(snapshot)
    if facts.provide_solution and not is_task_given:
        raise SnapshotUnsupportedError(
            f"{snapshot.snapshot_dir}: its episode had the task's solution and the variables for it: give `task`."
        )
    options = snapshot.container.get("options") or {}
    if container_factory is None and (reached := [name for name in _REACHING_OPTIONS if _opens(options.get(name))]):
        raise SnapshotUnsupportedError(
            f"{snapshot.snapshot_dir}: its container was made with {reached[0]}={options[reached[0]]!r:.100}. What a "
            "container may reach or begin with is not taken from a file: give `container_factory`."
        )
    return EpisodeSetup(
        container_factory or _made(snapshot, snapshot.container_type, options, "container_factory"),
        code_agent_factory
        or _made(snapshot, snapshot.agent.get("factory", ""), snapshot.agent.get("options"), "code_agent_factory"),
        limits or facts.limits(),
        facts.provide_solution,
        output_dir,
    )


def _opens(option: object) -> bool:
    """Whether an option lets a container reach more than its task says."""
    return bool(option) and option != "no-network"


def _made(snapshot: EnvironmentSnapshot, name: str, options: Any, argument: str) -> Any:
    """One of our own factories; nothing is imported by a name that a file gives."""
    if name not in _FACTORIES:
        raise SnapshotUnsupportedError(
            f"{snapshot.snapshot_dir}: it was made with {name!r:.100}, which is not known here: give `{argument}`."
        )
    module, attribute = _FACTORIES[name]
    try:
        return getattr(importlib.import_module(module), attribute)(**(options or {}))
    except (TypeError, ValueError, ConfigError) as error:
        raise SnapshotMetadataError(
            f"{snapshot.snapshot_dir}: the recorded options make no {attribute}: {error}. Give `{argument}`."
        ) from None


def recorded_task(snapshot: EnvironmentSnapshot) -> Task:
    """The task where it was. Blocking.

    Raises:
        SnapshotUnsupportedError, UnsafeSnapshotError: It has to be given.
        SnapshotMismatchError: It is not there any more.
        SnapshotMetadataError: What is recorded names none.
    """
    from ares_exp.tasks.harbor import load_task

    data = snapshot.task_data
    if snapshot.task_type != "harbor":
        raise SnapshotUnsupportedError(
            f"{snapshot.snapshot_dir}: its task is of the kind {snapshot.task_type!r:.60}: give `task`."
        )
    path, reward_key, extra = data.get("path"), data.get("reward_key"), data.get("extra_instructions", [])
    if not isinstance(path, str) or not isinstance(reward_key, str | None):
        raise SnapshotMetadataError(f"{snapshot.snapshot_dir}: `task_data` names no path.")
    if not isinstance(extra, list | tuple) or not all(isinstance(text, str) for text in extra):
        raise SnapshotMetadataError(f"{snapshot.snapshot_dir}: `task_data` has `extra_instructions` that are no texts.")
    store = snapshot.snapshot_dir.parent.resolve()
    if not Path(path).is_absolute() or Path(path).resolve().is_relative_to(store):  # a task may ask for host variables
        raise UnsafeSnapshotError(
            f"{snapshot.snapshot_dir}: expected its task's path to be absolute and outside of the store, got "
            f"{path!r:.200}: a snapshot cannot bring its own task. Give `task`."
        )
    try:
        task = load_task(path, reward_key=reward_key).with_extra_instructions(extra)
        task.check_runnable()
    except TaskError as error:
        raise SnapshotMismatchError(f"The snapshot's task is not at {path} any more: {error} Give `task`.") from None
    return task
