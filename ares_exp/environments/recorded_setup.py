"""Functions that read the facts, container, agent and task of an episode from its snapshot, to continue the episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Strict

from ares_exp.agents.code_agent import AgentFactoryBase, CodeAgentFactory, as_agent_factory
from ares_exp.config.parts import name_of
from ares_exp.config.targets import find_part, import_target, option_targets
from ares_exp.containers.container import ContainerFactory, ContainerFactoryBase, as_container_factory
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.past_stage import PastStage, read_stage
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import (
    ConfigError,
    SnapshotMetadataError,
    SnapshotMismatchError,
    SnapshotUnsupportedError,
    TaskError,
    UnsafeSnapshotError,
)
from ares_exp.llms.request import MessageEdit
from ares_exp.records.validation import Flag, Integer, Number, Table, validated
from ares_exp.tasks.task_contract import Task

if TYPE_CHECKING:
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """Facts about an episode when its snapshot was taken, from the table `episode` in `snapshot.json`.

    Attributes:
        seed: Seed of the episode.
        stage_seed: Seed for the random values of the running agent.
        unanswered: Number of time steps for which the policy did not respond in time.
        tokens: Number of prompt and generated tokens so far.
        cost: Cost in US dollars so far.
        elapsed_sec: Seconds of the agent's time limit that the agent has used.
        agent_started_at: Start of the running agent in epoch seconds; `None` for an agent without a journal.
        phase_sec: Seconds of wall-clock time by phase.
        provide_solution: Whether the episode ran the task's solution (`policy=oracle`).
        limits: Limits of the episode.
        edits: Changes that were made to the agent's messages before the policy saw them.
        past_stages: The finished stages, each as returned by `recorded_stage`.
    """

    seed: Annotated[int, Strict()]  # of any size
    stage_seed: Annotated[int, Strict()]
    unanswered: Integer
    tokens: Integer
    cost: Number
    elapsed_sec: Number
    agent_started_at: Number | None
    phase_sec: Mapping[str, Number]
    provide_solution: Flag
    limits: EpisodeLimits
    edits: tuple[MessageEdit, ...]
    past_stages: tuple[Table, ...] = ()

    @classmethod
    def of(cls, snapshot: EnvironmentSnapshot) -> EpisodeFacts:
        """Reads the facts of a snapshot. Raises `SnapshotMetadataError` if a value is invalid."""
        where = f"{snapshot.snapshot_dir}: `episode`"
        try:
            facts = validated(cls, snapshot.episode)
            for edit in facts.edits:
                MessageEdit.from_dict(edit.to_dict())
        except (ValueError, ConfigError) as error:
            raise SnapshotMetadataError(f"{where}: {error}.") from None
        if not 0 <= facts.unanswered <= snapshot.step_count:
            raise SnapshotMetadataError(
                f"{where}: expected `unanswered` of {snapshot.step_count}, got {facts.unanswered}."
            )
        return facts


def recorded_stages(snapshot: EnvironmentSnapshot, names: Sequence[str]) -> list[PastStage]:
    """Reads the finished stages of a snapshot. `names` are the names of all stages of the task. Blocking."""
    where, recorded = f"{snapshot.snapshot_dir}: `episode`", EpisodeFacts.of(snapshot).past_stages
    if len(recorded) >= len(names):
        raise SnapshotMetadataError(f"{where}: expected fewer `past_stages` than the {len(names)} stages of the task.")
    stages = [read_stage(one, snapshot.object_store, where) for one in recorded]
    if [stage.name for stage in stages] != list(names[: len(stages)]):
        raise SnapshotMetadataError(f"{where}: expected `past_stages` to be in the order of the task's stages.")
    counts = [0, *(stage.step_count for stage in stages), snapshot.step_count]
    if counts != sorted(counts):
        raise SnapshotMetadataError(f"{where}: expected `step_count` never to decrease in `past_stages`, got {counts}.")
    return stages


def recorded_setup(
    snapshot: EnvironmentSnapshot,
    container_factory: ContainerFactory | None,
    code_agent_factory: CodeAgentFactory | None,
    limits: EpisodeLimits | None,
    output_dir: Path | None,
    *,
    is_task_given: bool,
) -> EpisodeParts:
    """Returns the parts from which an episode continues. An argument that is `None` is read from the snapshot.

    A snapshot may come from someone else. It therefore cannot grant a container access to a network, or a task's
    solution access to environment variables of this machine. Instead, the caller must pass a container factory or a
    task.

    Raises:
        SnapshotUnsupportedError: The container factory, the agent factory or the task must be passed.
        SnapshotMetadataError: The recorded data is invalid.
    """
    facts = EpisodeFacts.of(snapshot)
    if facts.provide_solution and not is_task_given:
        raise SnapshotUnsupportedError(
            f"{snapshot.snapshot_dir}: this episode had access to the solution of its task. For security, such a task "
            "is not loaded from a snapshot. Pass `task`."
        )
    return EpisodeParts(
        as_container_factory(container_factory or recorded_container_factory(snapshot)),
        as_agent_factory(code_agent_factory or _recorded_agent_factory(snapshot)),
        limits or facts.limits,
        seed=0,
        provide_solution=facts.provide_solution,
        output_dir=output_dir,
    )


def recorded_container_factory(snapshot: EnvironmentSnapshot) -> Any:
    """Creates a container factory with the type and options that are recorded in the snapshot.

    Raises:
        SnapshotUnsupportedError: The snapshot has options that are not restored from a file for security reasons, or
            this installation lacks the container type. The caller must pass a factory.
        SnapshotMetadataError: The recorded options are invalid.
    """
    name, options = snapshot.container_type, snapshot.container.get("options") or {}
    target = option_targets("container").get(name)
    backend = import_target(target) if target is not None else None
    set_options = [key for key, value in options.items() if value and value != "no-network"]
    return _made(snapshot, name, backend, options, set_options, "container")


def recorded_agent_options(snapshot: EnvironmentSnapshot) -> dict[str, Any]:
    """Returns the options with which the agent factory in a snapshot was created."""
    return dict(snapshot.agent.get("options") or {})


def _recorded_agent_factory(snapshot: EnvironmentSnapshot) -> Any:
    name, options = snapshot.agent.get("factory", ""), recorded_agent_options(snapshot)
    return _made(snapshot, name, find_part("agent", name), options, [*options], "agent")


def _made(
    snapshot: EnvironmentSnapshot,
    name: str,
    factory: Any,
    options: Mapping[str, Any],
    set_options: Sequence[str],
    part: Literal["container", "agent"],
) -> Any:
    """Creates a container or agent factory with its recorded options.

    `set_options` are the options that must be harmless, because the snapshot may come from someone else. If the factory
    cannot be created, the error suggests that the caller passes a factory.
    """
    argument = "container_factory" if part == "container" else "code_agent_factory"
    if factory is None:
        raise SnapshotUnsupportedError(
            f"{snapshot.snapshot_dir}: {name!r:.100} is not available in this installation. Pass `{argument}`."
        )
    is_ours = isinstance(factory, type) and issubclass(factory, ContainerFactoryBase | AgentFactoryBase)
    harmless = factory.harmless_options if is_ours else frozenset()
    if reached := [key for key in set_options if key not in harmless]:
        raise SnapshotUnsupportedError(
            f"{snapshot.snapshot_dir}: the {part} was made with {reached[0]}={options[reached[0]]!r:.100}. For "
            f"security, a snapshot may not set this option. Pass `{argument}`."
        )
    try:
        return factory(**options)
    except (TypeError, ValueError, ConfigError) as error:
        raise SnapshotMetadataError(
            f"{snapshot.snapshot_dir}: cannot create {name_of(factory)} from the recorded options: {error}. "
            f"Pass `{argument}`."
        ) from None


def recorded_task(snapshot: EnvironmentSnapshot) -> Task:
    """Loads the task from its recorded path. Blocking.

    Raises:
        SnapshotUnsupportedError: Tasks of this kind cannot be loaded from a path. The caller must pass the task.
        UnsafeSnapshotError: The recorded path is relative or inside the snapshot store. The caller must pass the task.
        SnapshotMismatchError: The task at this path is missing or cannot be run.
        SnapshotMetadataError: The recorded data has no path of a task, or is malformed.
    """
    from ares_exp.tasks.harbor_task import load_task

    data = snapshot.task_data
    if snapshot.task_type != "harbor":
        raise SnapshotUnsupportedError(
            f"{snapshot.snapshot_dir}: tasks of the kind {snapshot.task_type!r:.60} cannot be loaded from a snapshot. "
            "Pass `task`."
        )
    path, reward_key, extra = data.get("path"), data.get("reward_key"), data.get("extra_instructions", [])
    if not isinstance(path, str) or not isinstance(reward_key, str | None):
        raise SnapshotMetadataError(f"{snapshot.snapshot_dir}: expected `task_data` to contain the task's `path`.")
    if not isinstance(extra, list | tuple) or not all(isinstance(text, str) for text in extra):
        raise SnapshotMetadataError(
            f"{snapshot.snapshot_dir}: expected `extra_instructions` in `task_data` to be a list of strings."
        )
    store = snapshot.snapshot_dir.parent.resolve()
    if not Path(path).is_absolute() or Path(path).resolve().is_relative_to(store):  # its env may read host variables
        raise UnsafeSnapshotError(
            f"{snapshot.snapshot_dir}: expected the path of the task to be absolute and outside of the snapshot store, "
            f"got {path!r:.200}. Pass `task`."
        )
    try:
        task = load_task(path, reward_key=reward_key).with_extra_instructions(extra)
        task.check_runnable()
    except TaskError as error:
        raise SnapshotMismatchError(f"The snapshot's task cannot be loaded from {path}: {error} Pass `task`.") from None
    return task
