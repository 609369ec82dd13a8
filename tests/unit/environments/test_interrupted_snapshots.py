"""Snapshots whose environment is closed, or whose caller is cancelled, in the middle; and what they may not ask for."""

import asyncio
import fcntl
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ares_exp import errors
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.restoring import Continuation
from ares_exp.llms.request import MessageEdit
from ares_exp.llms.response import LLMResponse
from ares_exp.snapshots.snapshot import EnvironmentSnapshot, with_checksum
from ares_exp.snapshots.store import LOCK_FILE
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import EpisodeCollector
from tests.unit.environments.snapshots import agent_of, ask

pytestmark = pytest.mark.local

RESPONSE = LLMResponse.from_text("Go on.")


async def asks_forever(container: Any, llm: Any) -> None:
    while True:
        await llm(ask())


async def ends_slowly(container: Any, llm: Any) -> None:
    try:
        await asks_forever(container, llm)
    finally:
        await asyncio.sleep(1)


async def works(container: Any, llm: Any) -> None:
    await llm(ask())
    await container.exec("sleep 1000")


asking = agent_of(asks_forever)


class OddState:
    state_version = 1
    state: Any = None

    def __init__(self, *, container: Any, llm_client: Any) -> None:
        self._llm = llm_client

    async def run(self, task: str) -> None:
        await asks_forever(None, self._llm)

    def get_state(self) -> Mapping[str, Any]:
        if isinstance(self.state, Exception):
            raise self.state
        return {"state": self.state}

    def set_state(self, state: Mapping[str, Any]) -> None: ...

    async def resume(self, task: str) -> None:
        await self.run(task)


async def exported(env: CodeEnvironment, store: Path, *, steps: int = 0) -> EnvironmentSnapshot:
    await env.reset()
    for _ in range(steps):
        await env.step(RESPONSE)
    snapshot = await env.export_state(store, snapshot_id="one")
    await env.close()
    return snapshot


def going_on(snapshot: EnvironmentSnapshot, **more: Any) -> CodeEnvironment:
    continuation = Continuation(snapshot, **more)
    return CodeEnvironment(
        [continuation.task],
        container_factory=LocalContainerFactory(),
        code_agent_factory=asking,
        start_from=continuation,
    )


async def test_close_during_snapshot_leaves_none(make_environment: Any, tmp_path: Path) -> None:
    env, store = make_environment(agent=agent_of(ends_slowly)), tmp_path / "store"
    await env.reset()
    store.mkdir()
    with (store / LOCK_FILE).open("w") as collector:
        fcntl.flock(collector, fcntl.LOCK_EX)
        exporting = asyncio.create_task(env.export_state(store, snapshot_id="one"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(env.close())
        await asyncio.sleep(0)
    with pytest.raises((errors.SnapshotError, errors.ContainerError)):
        await exporting
    await closing
    assert not (store / "one").exists()


async def test_close_during_restore_starts_no_container(make_environment: Any, tmp_path: Path) -> None:
    env = going_on(await exported(make_environment(agent=asking), tmp_path / "store"))
    resetting = asyncio.create_task(env.reset())
    await asyncio.sleep(0)
    await env.close()
    with pytest.raises(errors.EpisodeStateError, match="closed while"):
        await resetting
    await env.close()


async def test_close_during_step_is_reported(make_environment: Any) -> None:
    env = make_environment(agent=agent_of(works))
    await env.reset()
    stepping = asyncio.create_task(env.step(RESPONSE))
    await asyncio.sleep(0)
    await env.close()
    with pytest.raises(errors.EpisodeStateError, match="closed while"):
        await stepping


async def test_cancelled_fork_removes_its_directory(
    make_environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make_environment(agent=asking)
    await env.reset()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    forking = asyncio.create_task(env.fork(1))
    await asyncio.sleep(0)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert not list(temporary.iterdir())
    assert (await env.step(RESPONSE)).step_type == "MID"


async def test_forks_have_separate_verifier_directories(make_environment: Any, tmp_path: Path) -> None:
    env = make_environment(agent=asking, output_dir=tmp_path / "files")
    await env.reset()
    forks = [*await env.fork(2), *await env.fork(1)]
    assert len({fork._setup.output_dir for fork in forks}) == 3
    for fork in forks:
        await fork.close()


@pytest.mark.parametrize("state", [KeyError("missing"), object(), float("nan"), b"bytes"])
async def test_unreadable_state_is_refused(
    state: Any, make_environment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OddState, "state", state)
    env = make_environment(agent=OddState)
    await env.reset()
    with pytest.raises(errors.SnapshotUnsupportedError, match="The state of OddState"):
        await env.export_state(tmp_path / "store")
    assert (await env.step(RESPONSE)).step_type == "MID"


async def test_edit_preserves_earlier_observations(make_environment: Any, tmp_path: Path) -> None:
    snapshot = await exported(make_environment(agent=asking), tmp_path / "store", steps=2)
    async with going_on(snapshot, edits=[MessageEdit("replace", 0, "Otherwise.", 2)]) as env:
        await env.reset()
        again = await env.export_state(tmp_path / "store")
        await env.step(RESPONSE)
        assert _shown(env) == ["?", "?", "Otherwise.", "Otherwise."]
        async with going_on(again) as later:
            await later.reset()
            assert _shown(later) == _shown(env)[:3]


async def test_policy_time_before_a_snapshot_is_unknown(make_environment: Any, tmp_path: Path) -> None:
    snapshot = await exported(make_environment(agent=asking), tmp_path / "store", steps=1)
    async with going_on(snapshot) as env:
        await env.reset()
        collecting = TrajectoryCollectingEnvironment(env, EpisodeCollector())
        await collecting.step(RESPONSE)
        await collecting.step(RESPONSE)
        await collecting.close()
    seconds = [step.policy_sec for step in collecting.trajectory.steps]
    assert [one is None for one in seconds] == [True, False, True, False]
    assert all(one >= 0 for one in seconds if one is not None)


async def test_granted_time_is_not_counted_as_policy_time(make_environment: Any) -> None:
    env = make_environment(agent=asking)
    await env.reset()
    env.grant_time(1000.0)
    await env.step(RESPONSE)
    assert env.past_steps[-1].policy_sec < 0  # by the 1000 s that were not spent


@pytest.mark.parametrize("place", ["store/task", "relative"])
async def test_snapshot_cannot_provide_its_task(
    place: str, make_environment: Any, make_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await exported(make_environment(make_task(), agent=asking), tmp_path / "store")
    path = tmp_path / "store" / "task"
    Path(snapshot.task_data["path"]).rename(path)
    monkeypatch.chdir(path.parent)
    file = snapshot.snapshot_dir / "snapshot.json"
    data = json.loads(file.read_text())
    data["task_data"]["path"] = str(path) if place == "store/task" else "task"
    file.write_text(json.dumps(with_checksum(data)))
    with pytest.raises(errors.UnsafeSnapshotError, match="outside of the snapshot store"):
        await CodeEnvironment.load_from_state(snapshot.snapshot_dir, code_agent_factory=asking)


def _shown(env: CodeEnvironment) -> list[str]:
    return [past.time_step.observation.messages[0]["content"] for past in env.past_steps]
