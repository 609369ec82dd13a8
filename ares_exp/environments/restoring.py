"""The two ways to continue a recorded episode: from a snapshot, or by replaying its responses up to a step.

To continue from a snapshot, the facts, container, agent and task of the episode are read from it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from pydantic import Strict

from ares_exp.agents.code_agent import AgentFactoryBase, CodeAgentFactory, as_agent_factory
from ares_exp.agents.runtime.journal import Journal, decode_journal
from ares_exp.config.parts import import_name, name_of
from ares_exp.config.targets import find_part, import_target, option_targets
from ares_exp.containers.container import ContainerFactory, ContainerFactoryBase, as_container_factory
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.environment import PastStep, TimeStep
from ares_exp.environments.agent_host import AgentState
from ares_exp.environments.episode_limits import EpisodeLimits, PhaseClock
from ares_exp.environments.past_stage import PastStage, read_stage
from ares_exp.environments.source import EpisodeParts
from ares_exp.errors import (
    ConfigError,
    DivergenceError,
    SnapshotMetadataError,
    SnapshotMismatchError,
    SnapshotUnsupportedError,
    TaskError,
    UnsafeSnapshotError,
)
from ares_exp.llms.request import LLMRequest, MessageEdit
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import EpisodeUsage
from ares_exp.records.terminal_text import count_of
from ares_exp.records.validation import Flag, Integer, Number, Table, validated
from ares_exp.tasks.task_contract import Task
from ares_exp.trajectories.recorded_responses import Exchange, RecordedResponses
from ares_exp.trajectories.records import serialize_llm_request
from ares_exp.trajectories.request_diff import with_own

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot


logger = logging.getLogger(__name__)


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


class EpisodeStart(Protocol):
    """The recorded point from which an episode continues: a snapshot (`Continuation`), or a replay (`Rerun`)."""

    def prepare(self, episode: CodeEnvironment, tasks: Sequence[Task]) -> None:
        """Sets the task, the seed and other recorded values of `episode`, without starting the episode.

        The task is chosen by its recorded name from `tasks`, the tasks of the environment.

        Raises:
            SnapshotMismatchError: The task or the agent is missing or differs from the recording. Or the policy needs
                the task's solution, but the recorded container does not contain it.
        """

    async def go_on(self, episode: CodeEnvironment) -> TimeStep[LLMRequest]:
        """Starts the container and the agent at the recorded point, and returns the pending time step.

        After an exception, the caller must release `episode`.
        """


class Rerun:
    """Brings an episode to a step by passing the recorded responses to a new agent, which runs its commands again.

    The replay starts at the first step, or at a snapshot of an earlier step.
    """

    def __init__(
        self,
        task_name: str,
        exchanges: Sequence[Exchange],
        step: int,
        *,
        seed: int,
        lineage: Mapping[str, Any],
        edits: Sequence[MessageEdit] = (),
        snapshot: EpisodeStart | None = None,
        report: Callable[[str], None],
    ) -> None:
        """Prepares the replay, without starting it.

        Args:
            task_name: Name of the recorded task.
            exchanges: All recorded pairs of a request and its response. They include later steps, because the order of
                concurrent conversations may differ in the replay.
            step: Number of responses to replay.
            seed: The recorded seed.
            lineage: Ids of the root and parent episodes, and the recorded step, for the new episode's trajectory.
            edits: Edits that are applied to messages before the policy sees them. Ignored if `snapshot` is set, because
                a snapshot contains its own edits.
            snapshot: Snapshot of an earlier step from which the replay starts; by default, it starts at the first step.
            report: Callback for a message to the user if requests of the replay differ from the recorded requests.
        """
        self._task_name = task_name
        self._exchanges = exchanges
        self._step = step
        self._seed = seed
        self._lineage = lineage
        self._edits = tuple(edits)
        self._snapshot = snapshot
        self._report = report

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickling. After unpickling, `report` logs the messages as warnings."""
        return {**self.__dict__, "_report": logger.warning}

    def prepare(self, episode: CodeEnvironment, tasks: Sequence[Task]) -> None:
        """Sets the task, the seed, the lineage and the edits of `episode`; see `EpisodeStart`."""
        if self._snapshot is not None:
            self._snapshot.prepare(episode, tasks)
            return
        task = next((task for task in tasks if task.name == self._task_name), None)
        if task is None:
            raise SnapshotMismatchError(f"The environment lacks the task of the episode, {self._task_name!r:.100}.")
        episode.current_task, episode.seed = task, self._seed
        episode.lineage, episode.edits = self._lineage, self._edits

    async def go_on(self, episode: CodeEnvironment) -> TimeStep[LLMRequest]:
        """Replays the responses up to the step, and returns the pending time step.

        Raises:
            DivergenceError: The episode ends before the step, or the agent sends more requests than were recorded.
            AgentError, ContainerError, SnapshotError: The episode could not be started or continued.
        """
        started = time.perf_counter()
        time_step = await (episode.start() if self._snapshot is None else self._snapshot.go_on(episode))
        first = episode.usage.step_count
        recorded = RecordedResponses(
            self._exchanges, used=first, normalisers=with_own(episode.setup.code_agent_factory.normalisers)
        )
        ran = [_past_step(episode, time_step, None, started)]
        differing: list[int] = []
        for step in range(first, self._step + 1):
            assert time_step.observation is not None
            asked = serialize_llm_request(time_step.observation)
            exchange = recorded.next_for(asked)
            is_shown_as_it_was = all(edit.step != step for edit in self._edits)
            if exchange is not None and is_shown_as_it_was and not recorded.compare(exchange, asked, step).is_same:
                differing.append(step)
            if step == self._step:
                break
            if exchange is None or exchange.is_pending:
                raise self._diverged(step, "the agent sends more requests in a conversation than were recorded")
            recorded.use(asked)
            started = time.perf_counter()
            time_step = await episode.apply(exchange.response)
            if time_step.last():
                raise self._diverged(step + 1, "the episode ended")
            ran.append(_past_step(episode, time_step, exchange.response, started))
        episode.ran = tuple(ran)
        if differing:
            self._report(
                f"The replay up to step {self._step} differs from the recorded episode in "
                f"{count_of(len(differing), 'request')}, from step {differing[0]} on. The episode continues from "
                "the state of the replay."
            )
        return time_step

    def _diverged(self, step: int, why: str) -> DivergenceError:
        return DivergenceError(
            f"The replay of the recorded responses did not reach step {self._step}: at step {step} {why}.",
            step=step,
            why=why,
        )


def _past_step(
    episode: CodeEnvironment, time_step: TimeStep[LLMRequest], action: LLMResponse | None, started: float
) -> PastStep:
    return PastStep(
        time_step=time_step,
        action=action,
        timestamp=time.time(),
        policy_sec=None if action is None else 0.0,
        environment_sec=time.perf_counter() - started,
        activity=episode.seen.take(),
    )


class Continuation:
    """The continuation of an episode from a snapshot. Unlike a replay, it executes no command again."""

    def __init__(
        self,
        snapshot: EnvironmentSnapshot,
        *,
        task: Task | None = None,
        lineage: Mapping[str, Any] | None = None,
        edits: Sequence[MessageEdit] = (),
        new_seed: int | None = None,
        on_release: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Prepares the continuation, without starting it.

        Args:
            snapshot: The snapshot.
            task: The task; by default read from its recorded path.
            lineage: Ids of the root and parent episodes, and the recorded step, for the new episode's trajectory. By
                default, the lineage in the snapshot.
            edits: Changes to messages before the policy sees them, in addition to the edits in the snapshot.
            new_seed: Seed for the agent's random values after the snapshot. With `None`, the agent gets the same random
                values as in the original episode.
            on_release: Function that is awaited after the episode was released.
        """
        self.snapshot = snapshot
        self._given_task = task
        self._lineage = dict(snapshot.lineage if lineage is None else lineage)
        self._edits = tuple(edits)
        self._new_seed = new_seed
        self._on_release = on_release

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for pickling, without `on_release`. The task is read again from its recorded path."""
        kept = {name: value for name, value in self.__dict__.items() if name != "task"}
        return kept | {"_given_task": None, "_on_release": None}

    @cached_property
    def task(self) -> Task:
        """The task that the caller passed or, by default, the task at its recorded path. Blocking on first access.

        Raises:
            SnapshotMismatchError: The task is missing or has changed.
            SnapshotUnsupportedError: Tasks of this kind cannot be read from a path, so the caller must pass the task.
        """
        return _checked_task(self.snapshot, self._given_task or recorded_task(self.snapshot))

    def prepare(self, episode: CodeEnvironment, tasks: Sequence[Task]) -> None:
        """Sets the task, seed, usage, clock, lineage and edits of `episode` from the snapshot; see `EpisodeStart`."""
        snapshot, setup = self.snapshot, episode.setup
        _check_agent(snapshot, setup.code_agent_factory)
        facts = EpisodeFacts.of(snapshot)
        name = snapshot.task_data.get("name")
        task = next((task for task in tasks if task.name == name), None)
        checked = self.task if task is None else _checked_task(snapshot, task)
        if setup.provide_solution and not facts.provide_solution:
            raise SnapshotMismatchError(
                f"{snapshot.snapshot_dir}: `policy=oracle` cannot continue this episode, because its container "
                "does not contain the task's solution. Use another policy."
            )
        episode.setup = replace(setup, provide_solution=facts.provide_solution)
        episode.current_task, episode.seed = checked, facts.seed
        episode.usage = EpisodeUsage(
            num_steps=snapshot.step_count - facts.unanswered,
            unanswered=facts.unanswered,
            prompt_tokens=facts.tokens,  # prompt and generated tokens, because a snapshot has only their sum
            cost=facts.cost,
        )
        episode.clock = PhaseClock(dict(facts.phase_sec))
        episode.lineage = self._lineage
        episode.on_release = self._on_release
        episode.edits = (*facts.edits, *self._edits)

    async def go_on(self, episode: CodeEnvironment) -> TimeStep[LLMRequest]:
        """Starts the container with the files in the snapshot, and restores the agent; see `EpisodeStart`."""
        snapshot, facts = self.snapshot, EpisodeFacts.of(self.snapshot)
        changes, journal, state = await asyncio.to_thread(self._read)
        names = [stage.name for stage in episode.task.stages]
        episode.past_stages = await asyncio.to_thread(recorded_stages, snapshot, names)
        try:
            await episode.restore(changes, journal, elapsed_sec=facts.elapsed_sec, state=state)
        except DivergenceError as error:
            told = f"{error}{_hint(snapshot, episode.setup.code_agent_factory)}"
            raise DivergenceError(told, step=error.step, entry=error.entry, why=error.why) from None
        assert episode.host is not None
        if journal is None:
            factory = episode.setup.code_agent_factory
            await asyncio.to_thread(self._check_request, episode.pending_request(), factory)
        if self._new_seed is not None:
            episode.seed = self._new_seed  # also for the random values of agents of later stages
            episode.host.runtime.reseed(self._new_seed)
        recorded = snapshot.time_step
        return TimeStep(recorded["step_type"], recorded["reward"], recorded["discount"], episode.pending_request())

    def _check_request(self, request: LLMRequest, factory: AgentFactoryBase) -> None:
        """Raises `DivergenceError` if an agent that was restored from its state sends a different request. Blocking."""
        from ares_exp.snapshots.snapshot import encode_messages

        if [json.loads(line) for line in encode_messages(request.messages)] != self.snapshot.agent_messages:
            raise DivergenceError(
                f"{self.snapshot.snapshot_dir}: the request of the restored agent differs from the request in the "
                f"snapshot.{_hint(self.snapshot, factory)}",
                step=self.snapshot.step_count,
                why="the request of the restored agent differs from the request in the snapshot",
            )

    def _read(self) -> tuple[StoredChanges, Journal | None, AgentState | None]:
        """Reads and validates the file changes of the snapshot, and its journal or agent state. Blocking."""
        snapshot, objects = self.snapshot, self.snapshot.object_store
        where, facts = str(snapshot.snapshot_dir), EpisodeFacts.of(snapshot)
        _ = snapshot.agent_messages  # a replayed agent does not need them, but the snapshot must be complete
        delta = get_delta(objects, snapshot.filesystem)
        if delta.base != snapshot.filesystem_base or len(delta.entries) != snapshot.filesystem_entries:
            raise SnapshotMetadataError(f"{where}: the list of changed files does not match snapshot.json.")
        journal = state = None
        if snapshot.journal:
            if facts.agent_started_at is None:
                raise SnapshotMetadataError(f"{where}: expected `agent_started_at` to be a valid number, got None.")
            journal = decode_journal(
                objects.get_lines(snapshot.journal),
                started_at=facts.agent_started_at,
                seed=facts.stage_seed,
                where=where,
            )
            if len(journal.entries) != snapshot.journal_entries or not any(journal.steps()):
                raise SnapshotMetadataError(f"{where}: expected {snapshot.journal_entries} journal entries with steps.")
        elif (digest := snapshot.agent.get("state")) is not None:
            try:
                state = AgentState(snapshot.agent.get("state_version"), json.loads(objects.get(digest)))
            except (ValueError, RecursionError) as error:
                raise SnapshotMetadataError(f"{where}: the agent's state is not JSON: {error}.") from None
        elif snapshot.journal_entries:
            raise SnapshotMetadataError(f"{where}: expected {snapshot.journal_entries} journal entries, found none.")
        else:
            raise SnapshotUnsupportedError(
                f"{where}: no episode can continue from this snapshot. The agent was a process, so its state was not "
                "captured. Use `branch_from=<run>/<episode>@<step>` to replay the recorded responses."
            )
        return StoredChanges(delta, objects), journal, state


async def read_snapshot(snapshot: EnvironmentSnapshot | str | Path) -> EnvironmentSnapshot:
    """Reads a snapshot from its path; see `EnvironmentSnapshot.load_from_file`. Returns a snapshot object unchanged."""
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot

    if isinstance(snapshot, EnvironmentSnapshot):
        return snapshot
    return await asyncio.to_thread(EnvironmentSnapshot.load_from_file, Path(snapshot))


def _checked_task(snapshot: EnvironmentSnapshot, task: Task) -> Task:
    """Returns `task`. Raises `SnapshotMismatchError` if its name or digest differs from the snapshot."""
    was, now = snapshot.task_data, task.describe()
    for key in ("name", "digest"):
        if was.get(key) != now.get(key):
            raise SnapshotMismatchError(
                f"{snapshot.snapshot_dir}: the task has changed since the snapshot was taken: its {key} was "
                f"{was.get(key)!r:.80} and is now {now.get(key)!r:.80}. Use the original version of the task."
            )
    return task


def _check_agent(snapshot: EnvironmentSnapshot, factory: AgentFactoryBase) -> None:
    recorded, options = snapshot.agent.get("factory"), factory.options
    if recorded != import_name(factory):
        raise SnapshotMismatchError(
            f"{snapshot.snapshot_dir}: expected the agent factory {recorded!r:.100}, as in the snapshot, got "
            f"{import_name(factory)!r}. Choose the agent that was recorded."
        )
    was = recorded_agent_options(snapshot)
    if changed := sorted(key for key in {*was, *options} if was.get(key) != options.get(key)):
        key = changed[0]
        raise SnapshotMismatchError(
            f"{snapshot.snapshot_dir}: the agent's option `{key}` was {was.get(key)!r:.80} and is now "
            f"{options.get(key)!r:.80}. Use the original options of the agent."
        )


def _hint(snapshot: EnvironmentSnapshot, factory: AgentFactoryBase) -> str:
    was, now = snapshot.agent.get("source_digest"), factory.source_digest
    python = snapshot.writer.get("python")
    changed = " The agent's code has changed since the snapshot was taken." if was != now else ""
    return f"{changed} (The snapshot was written with Python {python!s:.20}.)"
