"""Writing an episode in the middle to a snapshot store."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp import __version__
from ares_exp.agents.code_agent import StatefulAgent
from ares_exp.containers.cancellation import finish
from ares_exp.containers.container import Container, ContainerSpec, SnapshottableContainer
from ares_exp.containers.shell_script import EXEC_ID_VARIABLE
from ares_exp.environments.agent_host import AgentHost
from ares_exp.environments.episode import Episode
from ares_exp.environments.past_stage import recorded_stage
from ares_exp.environments.time_step import TimeStep
from ares_exp.errors import SnapshotError, SnapshotTimingError, SnapshotUnsupportedError
from ares_exp.filesystem.delta import Delta
from ares_exp.filesystem.delta_encoding import put_delta
from ares_exp.llms.request import LLMRequest
from ares_exp.run_dir import dump_json

if TYPE_CHECKING:
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot
    from ares_exp.snapshots.store import SnapshotStore

QUIESCE_SEC = 30.0
"""How long calls of the agent that are being carried out may take to end before its state is captured."""

NOT_CAPTURED = (
    "running processes and their memory",
    "network connections and listening sockets",
    "mounts: /proc, /sys, /dev (with /dev/shm), tmpfs and volumes",
)

# Processes that commands have left behind, one a line: number and command line. Not itself.
_PROCESSES = f"""
files=$(grep -sl {EXEC_ID_VARIABLE}= /proc/[0-9]*/environ)
for file in $(grep -sL "{EXEC_ID_VARIABLE}=${EXEC_ID_VARIABLE}" $files /dev/null); do
  [ "$file" = /dev/null ] || {{
    dir=${{file%/environ}}
    command=$(tr '\\0\\n' '  ' <"$dir/cmdline") && echo "${{dir#/proc/}} $command"
  }} 2>/dev/null
done
exit 0
"""
_MAX_PROCESSES = 100


async def export_episode(
    episode: Episode,
    time_step: TimeStep[LLMRequest],
    output_dir: Path,
    snapshot_id: str | None,
    *,
    sync: bool = False,
) -> EnvironmentSnapshot:
    """Captures an episode that waits for an action; see `CodeEnvironment.export_state`.

    Args:
        episode: It goes on as if nothing had been.
        time_step: The pending one.
        output_dir: The store.
        snapshot_id: The snapshot's name; `None` makes one up.
        sync: Whether the snapshot must survive a power cut when this returns.
    """
    from ares_exp.snapshots.store import SnapshotStore

    host, container = episode.host, episode.container
    assert host is not None
    assert container is not None
    snapshot_id = SnapshotStore.new_id() if snapshot_id is None else SnapshotStore.check_id(snapshot_id)
    if not isinstance(container, SnapshottableContainer):
        raise SnapshotUnsupportedError(
            f"Containers of {episode.setup.container_factory.name!r} cannot be captured: they have no "
            "`capture_changes`. Use container=docker or container=local."
        )
    _refuse_unknowable(host)
    store = SnapshotStore(output_dir)
    await host.quiesce(QUIESCE_SEC)
    try:
        state = _state_of(host)
        elapsed_sec = host.runtime.elapsed_sec
        with ExitStack() as writing:
            await asyncio.to_thread(writing.enter_context, store.writing())
            processes = await _processes(container)
            delta = await container.capture_changes(store.objects)
            if episode.host is not host:
                raise SnapshotTimingError("The environment was closed while its state was being captured.")
            write = _Writing(episode, host, time_step, snapshot_id, state, elapsed_sec, delta, processes)
            committing = asyncio.create_task(asyncio.to_thread(write.commit, store, sync=sync))
            await finish(asyncio.wait({committing}))  # the thread goes on when the caller is cancelled: under the lock
            return committing.result()
    finally:
        host.runtime.release()


class _Writing:
    """What is to be written; `commit` touches nothing that the event loop might touch meanwhile."""

    def __init__(
        self,
        episode: Episode,
        host: AgentHost,
        time_step: TimeStep[LLMRequest],
        snapshot_id: str,
        state: Mapping[str, Any] | None,
        elapsed_sec: float,
        delta: Delta,
        processes: list[str],
    ) -> None:
        self._episode = episode
        self._time_step = time_step
        self._snapshot_id = snapshot_id
        self._state = state
        self._state_version = getattr(host.agent, "state_version", None)
        self._delta = delta
        self._spec = episode.container_spec
        journal = host.runtime.journal
        self._journal = replace(journal, entries=list(journal.entries)) if journal is not None else None
        self._facts = {
            "seed": episode.seed,
            "stage_seed": journal.seed if journal is not None else episode.seed,
            "unanswered": episode.usage.unanswered,
            "tokens": episode.usage.tokens,
            "cost": episode.usage.cost,
            "elapsed_sec": elapsed_sec,
            "agent_started_at": journal.started_at if journal is not None else None,
            "phase_sec": dict(episode.clock.seconds),
            "provide_solution": episode.setup.provide_solution,
            "limits": asdict(episode.setup.limits),
            "edits": [edit.to_dict() for edit in episode.edits],
        }
        self._past_stages = tuple(episode.past_stages)
        self._container = {
            "options": _options(episode.setup.container_factory),
            "workdir": self._spec.workdir,
            "env_names": sorted(self._spec.env),
            "processes": processes,
            "not_captured": [*NOT_CAPTURED, *delta.notes],
        }

    def commit(self, store: SnapshotStore, *, sync: bool) -> EnvironmentSnapshot:
        """Writes everything. Blocking."""
        from ares_exp.snapshots.snapshot import EnvironmentSnapshot, encode_messages

        episode, time_step, spec, objects = self._episode, self._time_step, self._spec, store.objects
        assert time_step.observation is not None
        task_data = dict(episode.task.describe())
        lines = episode.encoder.update(self._journal) if self._journal is not None else []
        snapshot = EnvironmentSnapshot(
            snapshot_id=self._snapshot_id,
            created_at=datetime.now(UTC).isoformat(),
            snapshot_dir=store.path / self._snapshot_id,
            step_count=episode.usage.step_count,
            step_limit=episode.setup.limits.steps,
            task_type=str(task_data.get("format", type(episode.task).__name__)),
            task_data=task_data,
            container_type=episode.setup.container_factory.name,
            container_image=episode.container_image,
            container_dockerfile_path=_dockerfile(spec),
            container_resources={name: getattr(spec, name) for name in ("cpus", "memory_mb", "storage_mb", "gpus")},
            time_step={
                "step_type": time_step.step_type,
                "reward": time_step.reward,
                "discount": time_step.discount,
            },
            message_objects=objects.put_lines(encode_messages(time_step.observation.messages)),
            journal=objects.put_lines(lines),
            journal_entries=len(lines),
            filesystem=put_delta(self._delta, objects),
            filesystem_base=self._delta.base,
            filesystem_entries=len(self._delta.entries),
            filesystem_bytes=sum(entry.size for entry in self._delta.entries.values()),
            container=self._container,
            agent=self._agent(objects),
            episode={**self._facts, "past_stages": [recorded_stage(past, objects) for past in self._past_stages]},
            lineage=dict(episode.lineage),
            writer={
                "ares_exp": __version__,
                "python": platform.python_version(),
                "platform": f"{platform.system()}/{platform.machine()}".lower(),
            },
        )
        return store.commit(snapshot, sync=sync)

    def _agent(self, objects: Any) -> dict[str, Any]:
        factory = self._episode.setup.code_agent_factory
        kept: dict[str, Any] = {"state": None, "state_version": None}
        if self._state is not None:
            kept["state"] = objects.put(dump_json(self._state).encode())
            kept["state_version"] = self._state_version
        return {
            "factory": factory_name(factory),
            "options": _options(factory),
            "source_digest": source_digest(factory),
            **kept,
        }


def _refuse_unknowable(host: AgentHost) -> None:
    """Raises `SnapshotUnsupportedError` when there is no journal, and the agent gives no state of itself either."""
    if host.runtime.journal is None and not isinstance(host.agent, StatefulAgent):
        raise SnapshotUnsupportedError(
            f"{type(host.agent).__name__} is not deterministic (its factory says so) and has no get_state(): its state "
            "can be had in neither way."
        )


def _state_of(host: AgentHost) -> Mapping[str, Any] | None:
    """What the agent gives of itself, if it does.

    Raises:
        SnapshotUnsupportedError: It fails to, or what it gives could not be read again.
    """
    from ares_exp.snapshots.checked_json import check_json

    if not isinstance(host.agent, StatefulAgent):
        return None
    kind = type(host.agent).__name__
    try:
        state = host.agent.get_state()
        check_json(state, f"{kind}.get_state()")
    except Exception as error:
        raise SnapshotUnsupportedError(f"The state of {kind} cannot be captured: {_words(error)}") from error
    return state


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, SnapshotError) else f"it raised {type(error).__name__}: {error}."


async def _processes(container: Container) -> list[str]:
    """What commands have left running, a line each; what cannot be found out is left out."""
    listed = await container.exec(_PROCESSES, cwd="/", user="root", timeout_sec=10.0, shell="sh -c")
    return listed.output.splitlines()[:_MAX_PROCESSES] if listed.exit_code == 0 else []


def _dockerfile(spec: ContainerSpec) -> str | None:
    path = spec.context_dir / "Dockerfile" if spec.context_dir is not None else None
    return str(path) if path is not None and path.is_file() else None


def _options(factory: object) -> dict[str, Any]:
    """What a factory was made with, as far as it tells."""
    return dict(getattr(factory, "options", None) or {})


def factory_name(factory: object) -> str:
    """What a factory of agents is called in records."""
    kind = factory if inspect.isfunction(factory) or inspect.isclass(factory) else type(factory)
    return f"{kind.__module__}.{kind.__qualname__}"


def source_digest(factory: Callable[..., Any]) -> str | None:
    """A digest of the code that an agent factory is defined in; `None` where there is no source."""
    given = getattr(factory, "source_digest", None)
    if isinstance(given, str):
        return given
    try:
        source = inspect.getsource(
            inspect.getmodule(factory if inspect.isfunction(factory) else type(factory)) or object
        )
    except (OSError, TypeError):
        return None
    return f"sha256:{hashlib.sha256(source.encode()).hexdigest()}"
