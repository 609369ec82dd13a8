"""Snapshots that do not fit, are broken, or were written by an enemy: a clear error, and nothing left running."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.restoring import Continuation
from ares_exp.errors import (
    DivergenceError,
    SnapshotCorruptError,
    SnapshotError,
    SnapshotMetadataError,
    SnapshotMismatchError,
    SnapshotNotFoundError,
    SnapshotUnsupportedError,
)
from ares_exp.snapshots.snapshot import with_checksum
from ares_exp.tasks.harbor_task import load_task
from tests.installed_package import Site
from tests.unit.environments.snapshots import Restore, agent_of, ask, run, running_boxes

pytestmark = pytest.mark.local

Metadata = dict[str, Any]


@pytest.fixture
async def snapshot(make_environment: Any, store: Path) -> Path:
    """The directory of a snapshot of the shell agent, after two steps."""
    env = make_environment()
    await env.reset()
    await env.step(run("echo 4 > /half; echo made"))
    await env.step(run("echo $(cat /half)2 > /answer"))
    found = await env.export_state(store, snapshot_id="mine")
    await env.close()
    return Path(found.snapshot_dir)


def edit(snapshot: Path, change: Callable[[Metadata], object]) -> None:
    """Writes the metadata anew, its checksum included: as one who forges it."""
    path = snapshot / "snapshot.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(sealed(data)))


def sealed(data: Metadata) -> Metadata:
    """The metadata with its checksum, unless its schema is none."""
    schema = data.get("schema")
    return with_checksum(data) if isinstance(schema, list) and {*map(type, schema)} == {int} else data


async def refused(snapshot: Path, kind: type[SnapshotError], told: str, **options: Any) -> SnapshotError:
    """Whether it is not restored, with that error, and nothing is left of the try; returns the error."""
    before = running_boxes()
    with pytest.raises(kind, match=told) as caught:
        await CodeEnvironment.load_from_state(snapshot, **options)
    assert type(caught.value) is kind
    assert running_boxes() == before
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return caught.value


async def test_other_task_or_agent_is_refused(snapshot: Path, make_task: Any, tmp_path: Path) -> None:
    async def other(container: Any, llm: Any) -> None:
        await llm(ask())

    agent = ShellAgentFactory(command_timeout_sec=20, max_output_chars=500)
    factory = r"expected the agent factory 'ares_exp\.agents\.shell_agent\.ShellAgentFactory', as in the snapshot"
    for options, told in (
        ({"task": make_task("other")}, "its name was 'task' and is now 'other'"),
        ({"code_agent_factory": agent}, "option `max_output_chars` was 10000 and is now 500"),
        ({"code_agent_factory": agent_of(other)}, factory),
    ):
        await refused(snapshot, SnapshotMismatchError, told, **options)
    (tmp_path / "tasks" / "task" / "instruction.md").write_text("Write 43.\n")
    await refused(snapshot, SnapshotMismatchError, "the task has changed since the snapshot was taken: its digest")


async def test_moved_task_can_be_passed(snapshot: Path, tmp_path: Path, restore: Restore) -> None:
    elsewhere = tmp_path / "elsewhere" / "task"
    shutil.move(tmp_path / "tasks" / "task", elsewhere)
    await refused(snapshot, SnapshotMismatchError, r"cannot be loaded from .*tasks/task: .* Pass `task`")
    env = await restore(snapshot, task=load_task(elsewhere))
    assert env.step_count == 2


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (False, "message 1 of 1 of an LLM request differs from the recording: .*Good day.*written with Python 3"),
        (True, "expected an LLM request with 1 messages as in the recording, but it ended"),
    ],
)
async def test_changed_agent_is_refused(make_environment: Any, store: Path, fails: bool, told: str) -> None:
    has_changed = False

    async def talks(container: Any, llm: Any) -> None:
        if has_changed and fails:
            raise RuntimeError("broken")
        await llm(ask("Good day." if has_changed else "Hello."))

    factory = agent_of(talks)
    env = make_environment(agent=factory)
    await env.reset()
    found = await env.export_state(store)
    await env.close()
    has_changed = True
    error = await refused(Path(found.snapshot_dir), DivergenceError, told, code_agent_factory=factory)
    assert isinstance(error, DivergenceError)
    if not fails:
        assert (error.step, error.entry) == (0, 0)
        assert error.why.startswith("message 1 of 1 of an LLM request")


async def test_missing_snapshot_or_store_is_refused(snapshot: Path) -> None:
    await refused(snapshot.with_name("other"), SnapshotNotFoundError, "other")
    shutil.rmtree(snapshot.parent / "objects")
    await refused(snapshot, SnapshotCorruptError, "objects")


async def test_missing_or_damaged_objects_are_detected(snapshot: Path) -> None:
    paths = [path for path in (snapshot.parent / "objects").glob("*/*") if path.is_file()]
    needed = 0
    for path in paths:
        content = path.read_bytes()
        for broken in (None, b"", content[:-1] + bytes([content[-1] ^ 1])):
            path.unlink() if broken is None else path.write_bytes(broken)
            try:
                env = await CodeEnvironment.load_from_state(snapshot)
            except SnapshotCorruptError as error:
                needed += 1
                told = str(error)
                assert path.name in told or path.name[:8] in told
            else:  # messages alone: a journal brings them again
                await env.close()
            path.write_bytes(content)
    assert needed >= 6
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_unknown_container_kind_is_refused(snapshot: Path, restore: Restore) -> None:
    edit(snapshot, lambda data: data.update(container_type="moon"))
    await refused(snapshot, SnapshotUnsupportedError, "'moon' is not available in this installation. Pass `container_f")
    assert (await restore(snapshot, container_factory=LocalContainerFactory())).step_count == 2


async def test_plugin_container_and_agent_are_restored(snapshot: Path, restore: Restore, site: Site) -> None:
    files = {
        "rover/__init__.py": """
from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.local import LocalContainerFactory

class Moon(LocalContainerFactory):
    name = "moon"

class Walker(ShellAgentFactory):
    pass
""",
        "rover/conf/container/moon.yaml": "_target_: rover.Moon\n",
        "rover/conf/agent/walker.yaml": "_target_: rover.Walker\n",
    }
    site.install("rover", {"moon": "rover.conf"}, files)
    edit(snapshot, lambda data: data.update(container_type="moon"))
    edit(snapshot, lambda data: data["agent"].update(factory="rover.Walker"))
    env = await restore(snapshot)
    assert env.step_count == 2
    again = await env.export_state(snapshot.parent, snapshot_id="again")
    assert (again.container_type, again.agent["factory"]) == ("moon", "rover.Walker")


async def test_names_in_files_are_not_imported(snapshot: Path) -> None:
    edit(snapshot, lambda data: data["agent"].update(factory="os.system"))
    await refused(snapshot, SnapshotUnsupportedError, "'os.system' is not available in .* Pass `code_agent")


async def test_invalid_container_options_are_refused(snapshot: Path) -> None:
    edit(snapshot, lambda data: data["container"].update(options={"pids_limit": 1}))
    await refused(
        snapshot,
        SnapshotMetadataError,
        r"(?s)cannot create LocalContainerFactory from the recorded options.*pids_limit",
    )


async def test_unsafe_options_are_not_restored_from_file(snapshot: Path, restore: Restore) -> None:
    edit(snapshot, lambda data: data["container"].update(options={"mount": "/"}))
    await refused(
        snapshot, SnapshotUnsupportedError, "made with mount='/'.* may not set this option. Pass `container_fac"
    )
    edit(snapshot, lambda data: data["container"].update(options={}))
    edit(snapshot, lambda data: data["agent"].update(options={"startup": "rm -rf /"}))
    await refused(
        snapshot, SnapshotUnsupportedError, "made with startup=.* may not set this option. Pass `code_agent_fac"
    )


HOSTILE: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "no seed": (lambda data: data["episode"].pop("seed"), "expected `seed`, but it is missing"),
    "a text as seed": (lambda data: data["episode"].update(seed="1"), "`seed` to be a valid integer, got '1'"),
    "tokens": (lambda data: data["episode"].update(tokens=None), "`tokens` to be a valid integer"),
    "cost": (lambda data: data["episode"].update(cost=[]), "`cost` to be a valid number"),
    "no clock": (lambda data: data["episode"].pop("elapsed_sec"), "expected `elapsed_sec`, but it is missing"),
    "no start": (lambda data: data["episode"].update(agent_started_at=True), "`agent_started_at` to be a valid number"),
    "phases": (lambda data: data["episode"].update(phase_sec={"start": "long"}), "`phase_sec.start` to be a valid num"),
    "limits": (lambda data: data["episode"].update(limits={"steps": "many"}), "limits"),
    "time limits": (lambda data: data["episode"].update(limits={"time": {"agent_timeout_sec": "x"}}), "limits"),
    "edits": (lambda data: data["episode"].update(edits=[{"kind": "delete"}]), "edits"),
    "entries": (lambda data: data.update(journal_entries=3), "expected 3 journal entries"),
    "no journal": (lambda data: data.update(journal=[]), "journal entries, found none"),
    "files": (lambda data: data.update(filesystem_entries=99), "list of changed files"),
}


async def test_inconsistent_metadata_is_refused(stored: tuple[Path, bytes]) -> None:
    snapshot, content = stored
    for change, told in HOSTILE.values():
        (snapshot / "snapshot.json").write_bytes(content)
        edit(snapshot, change)
        await refused(snapshot, SnapshotMetadataError, told)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
# One restored episode costs a container: few examples, and no shrinking.
fuzz = settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def change_somewhere(data: st.DataObject, target: Any) -> None:
    """Puts another value somewhere into nested dicts and lists."""
    while isinstance(target, dict | list) and target:
        key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
        if not isinstance(target[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
            target[key] = data.draw(JSON)
            return
        target = target[key]


def run_one_step(snapshot: Path) -> None:
    """Restores it, if it is fit to be, and takes a step; nothing else than an error of snapshots may be raised."""

    async def execute() -> None:
        try:
            env = await CodeEnvironment.load_from_state(snapshot)
        except SnapshotError:
            pass
        else:
            async with env:
                await env.step(run("true"))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(execute())


@pytest.fixture
def stored(snapshot: Path) -> tuple[Path, bytes]:
    """The snapshot, and its metadata."""
    return snapshot, (snapshot / "snapshot.json").read_bytes()


@pytest.mark.parametrize("part", ["all", "episode"])
@fuzz
@given(data=st.data())
def test_arbitrary_metadata_is_refused_cleanly(stored: tuple[Path, bytes], part: str, data: st.DataObject) -> None:
    snapshot, content = stored
    (snapshot / "snapshot.json").write_bytes(content)
    before = running_boxes()
    edit(snapshot, lambda metadata: change_somewhere(data, metadata.get(part, metadata)))
    run_one_step(snapshot)
    assert running_boxes() == before


@fuzz
@given(st.data())
def test_arbitrary_journal_is_refused_cleanly(stored: tuple[Path, bytes], data: st.DataObject) -> None:
    snapshot, content = stored
    metadata = json.loads(content)
    objects = ObjectStore(snapshot.parent)
    lines = [json.loads(line) for line in objects.get_lines(metadata["journal"])]
    for _ in range(data.draw(st.integers(1, 2))):
        change_somewhere(data, lines)
    metadata["journal"] = objects.put_lines([json.dumps(line).encode() for line in lines])
    (snapshot / "snapshot.json").write_text(json.dumps(sealed(metadata)))
    before = running_boxes()
    run_one_step(snapshot)
    assert running_boxes() == before


async def test_oracle_needs_the_solution_to_continue(make_environment: Any, make_task: Any, store: Path) -> None:
    task = make_task(solution="#!/bin/sh\necho 42 > /answer\n")
    env = make_environment(task)
    await env.reset()
    going_on = Continuation(await env.export_state(store), task=task)
    oracle = make_environment(task, provide_solution=True, start_from=going_on)
    with pytest.raises(SnapshotMismatchError, match="does not contain the task's solution"):
        await oracle.reset()
