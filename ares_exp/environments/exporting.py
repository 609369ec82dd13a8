"""Functions that save a running episode as a snapshot, and that fork an episode."""

from __future__ import annotations

import asyncio
import hashlib
import platform
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ares_exp import __version__
from ares_exp.agents.code_agent import StatefulAgent
from ares_exp.cancellation import finish, in_thread
from ares_exp.config.parts import import_name
from ares_exp.containers.container import SnapshottableContainer
from ares_exp.containers.filesystem.delta import Delta
from ares_exp.containers.filesystem.delta_encoding import put_delta
from ares_exp.containers.ownership import working_directory
from ares_exp.containers.shell_channel import EXEC_ID_VARIABLE
from ares_exp.environment import TimeStep
from ares_exp.environments.agent_host import AgentHost
from ares_exp.environments.past_stage import recorded_stage
from ares_exp.environments.restoring import Continuation, EpisodeFacts
from ares_exp.errors import SnapshotError, SnapshotTimingError, SnapshotUnsupportedError
from ares_exp.llms.request import LLMRequest
from ares_exp.records.run_dir import dump_json

if TYPE_CHECKING:
    from ares_exp.environments.code_environment import CodeEnvironment
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot
    from ares_exp.snapshots.store import SnapshotStore


# Prints the id and the command line of each process that an earlier command has left, one process per line. Finds them
# by a variable that `exec` sets. Skips the script's own process.
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


QUIESCE_SEC = 30.0
"""Seconds for which a capture waits until the running commands and other calls of the agent have ended."""

NOT_CAPTURED = (
    "running processes and their memory",
    "network connections and listening sockets",
    "mounts: /proc, /sys, /dev (with /dev/shm), tmpfs and volumes",
)

THE_AGENT = "the agent, because it is a process: no episode can continue from this snapshot"


async def export_episode(
    episode: CodeEnvironment,
    time_step: TimeStep[LLMRequest],
    output_dir: Path,
    snapshot_id: str | None,
    *,
    sync: bool = False,
) -> EnvironmentSnapshot:
    """Writes a snapshot of an episode that waits for an action; see `CodeEnvironment.export_state`.

    `time_step` is the pending time step. If `snapshot_id` is `None`, a new id is generated.
    """
    from ares_exp.snapshots.snapshot import check_id, new_id
    from ares_exp.snapshots.store import SnapshotStore

    host, container = episode.host, episode.container
    assert host is not None
    assert container is not None
    snapshot_id = new_id() if snapshot_id is None else check_id(snapshot_id)
    if not isinstance(container, SnapshottableContainer):
        raise SnapshotUnsupportedError(
            f"Containers of {episode.setup.container_factory.name!r} cannot be captured, because they have no "
            "`capture_changes`. Use container=docker or container=local."
        )
    store = SnapshotStore(output_dir)
    if episode.setup.code_agent_factory.can_be_restored:  # otherwise only the files are captured
        if host.runtime.journal is None and not isinstance(host.agent, StatefulAgent):
            raise SnapshotUnsupportedError(
                f"The state of {type(host.agent).__name__} cannot be captured, because the agent is not deterministic "
                "and has no get_state(). Add get_state() and set_state() to the agent."
            )
        await host.quiesce(QUIESCE_SEC)
    try:
        state = _state_of(host)
        elapsed_sec = host.runtime.elapsed_sec
        with ExitStack() as writing:
            await asyncio.to_thread(writing.enter_context, store.writing())
            listed = await container.exec(_PROCESSES, cwd="/", user="root", timeout_sec=10.0, shell="sh -c")
            processes = listed.output.splitlines()[:_MAX_PROCESSES] if listed.exit_code == 0 else []
            delta = await container.capture_changes(store.objects)
            if episode.host is not host:
                raise SnapshotTimingError("The environment was closed while its state was being captured.")
            commit = _writing(episode, host, time_step, snapshot_id, state, elapsed_sec, delta, processes)
            return await in_thread(lambda: commit(store, sync))
    finally:
        host.runtime.release()


def _writing(
    episode: CodeEnvironment,
    host: AgentHost,
    time_step: TimeStep[LLMRequest],
    snapshot_id: str,
    state: Mapping[str, Any] | None,
    elapsed_sec: float,
    delta: Delta,
    processes: list[str],
) -> Callable[[SnapshotStore, bool], EnvironmentSnapshot]:
    """Copies an episode's data. Returns a function that writes this data as a snapshot, and may run in a thread."""
    from ares_exp.snapshots.snapshot import EnvironmentSnapshot, encode_messages

    assert time_step.observation is not None
    messages, setup, spec = time_step.observation.messages, episode.setup, episode.container_spec
    journal, past_stages, agents = host.runtime.journal, tuple(episode.past_stages), setup.code_agent_factory
    entries = replace(journal, entries=list(journal.entries)) if journal is not None else None
    state_version = host.agent.state_version if isinstance(host.agent, StatefulAgent) else None
    facts = EpisodeFacts(
        seed=episode.seed,
        stage_seed=journal.seed if journal is not None else episode.seed,
        unanswered=episode.usage.unanswered,
        tokens=episode.usage.tokens,
        cost=episode.usage.cost,
        elapsed_sec=elapsed_sec,
        agent_started_at=journal.started_at if journal is not None else None,
        phase_sec=dict(episode.clock.seconds),
        provide_solution=setup.provide_solution,
        limits=setup.limits,
        edits=tuple(episode.edits),
    )
    container = {
        "options": dict(setup.container_factory.options),
        "workdir": spec.workdir,
        "env_names": sorted(spec.env),
        "processes": processes,
        "not_captured": [*([] if agents.can_be_restored else [THE_AGENT]), *NOT_CAPTURED, *delta.notes],
    }
    dockerfile = spec.context_dir / "Dockerfile" if spec.context_dir is not None else None

    def commit(store: SnapshotStore, sync: bool) -> EnvironmentSnapshot:
        objects, task_data = store.objects, dict(episode.task.describe())
        lines = episode.encoder.update(entries) if entries is not None else []
        snapshot = EnvironmentSnapshot(
            snapshot_id=snapshot_id,
            created_at=datetime.now(UTC).isoformat(),
            snapshot_dir=store.path / snapshot_id,
            step_count=episode.step_count,
            step_limit=setup.limits.steps,
            task_type=str(task_data.get("format", type(episode.task).__name__)),
            task_data=task_data,
            container_type=setup.container_factory.name,
            container_image=episode.container_image,
            container_dockerfile_path=str(dockerfile) if dockerfile is not None and dockerfile.is_file() else None,
            container_resources={name: getattr(spec, name) for name in ("cpus", "memory_mb", "storage_mb", "gpus")},
            time_step={"step_type": time_step.step_type, "reward": time_step.reward, "discount": time_step.discount},
            message_objects=objects.put_lines(encode_messages(messages)),
            journal=objects.put_lines(lines),
            journal_entries=len(lines),
            filesystem=put_delta(delta, objects),
            filesystem_base=delta.base,
            filesystem_entries=len(delta.entries),
            filesystem_bytes=sum(entry.size for entry in delta.entries.values()),
            container=container,
            agent={
                "factory": import_name(agents),
                "options": dict(agents.options),
                "source_digest": agents.source_digest,
                "state": objects.put(dump_json(state).encode()) if state is not None else None,
                "state_version": state_version if state is not None else None,
            },
            episode={**asdict(facts), "past_stages": [recorded_stage(past, objects) for past in past_stages]},
            lineage=dict(episode.lineage),
            writer={
                "ares_exp": __version__,
                "python": platform.python_version(),
                "platform": f"{platform.system()}/{platform.machine()}".lower(),
            },
        )
        return store.commit(snapshot, sync=sync)

    return commit


def _state_of(host: AgentHost) -> Mapping[str, Any] | None:
    """Returns the result of the agent's `get_state`; `None` for an agent without this method."""
    from ares_exp.snapshots.snapshot import check_json

    if not isinstance(host.agent, StatefulAgent):
        return None
    kind = type(host.agent).__name__
    try:
        state = host.agent.get_state()
        check_json(state, f"{kind}.get_state()")
    except Exception as error:
        why = str(error) if isinstance(error, SnapshotError) else f"it raised {type(error).__name__}: {error}."
        raise SnapshotUnsupportedError(f"The state of {kind} cannot be captured: {why}") from error
    return state


EnvironmentT = TypeVar("EnvironmentT", bound="CodeEnvironment")


async def fork_episode(
    episode: EnvironmentT, time_step: TimeStep[LLMRequest], n: int, *, diversify: bool
) -> list[EnvironmentT]:
    """Makes `n` environments that wait for an action at `time_step`, like `episode`; see `CodeEnvironment.fork`."""
    factory = episode.setup.code_agent_factory
    if not factory.can_be_restored:
        raise SnapshotUnsupportedError(
            f"Episodes of {factory.name} cannot be forked, because the agent is a process in its container. Use "
            "`branch_from=` to branch a recorded run, which replays its responses."
        )
    made: list[EnvironmentT] = []
    files, users = AsyncExitStack(), [*range(n)]  # the last user removes the files, because later captures read them

    async def give_up() -> None:
        users.pop()
        if not users:
            await files.aclose()

    try:
        try:
            folder = await files.enter_async_context(working_directory("fork"))
        except OSError as error:
            raise SnapshotError(f"Cannot make a directory for a fork: {error.strerror or error}.") from None
        snapshot = await export_episode(episode, time_step, folder, None)
        parent = snapshot.snapshot_id  # the episode's own id is unknown here
        for branch in range(n):
            lineage = {
                "root": episode.lineage.get("root", parent),
                "parent": parent,
                "step": episode.step_count,
                "branch": branch,
            }
            digest = hashlib.sha256(f"{parent}/{branch}".encode()).digest()
            seed = int.from_bytes(digest[:8], "big") if diversify else None
            if (output_dir := episode.setup.output_dir) is not None:
                output_dir = output_dir.with_name(f"{output_dir.name}-fork-{parent}-{branch}")
            continuation = Continuation(snapshot, task=episode.task, lineage=lineage, new_seed=seed, on_release=give_up)
            parts = replace(episode.setup, output_dir=output_dir, start_from=continuation)
            made.append(type(episode).for_episode(episode.task, parts))
        async with asyncio.TaskGroup() as resets:
            for environment in made:
                resets.create_task(environment.reset())
    except BaseException as error:
        closing = asyncio.gather(*(environment.close() for environment in made), return_exceptions=True)
        await finish(asyncio.wait({closing}))
        await files.aclose()
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from None
        raise
    return made
