"""Snapshots of tasks of several stages: taken at any of them, restored, forked; and those that somebody has changed."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.filesystem.zstd import zstd
from ares_exp.environments.recorded_setup import EpisodeFacts
from ares_exp.errors import SnapshotMetadataError
from ares_exp.snapshots.document import with_checksum
from ares_exp.snapshots.store import SnapshotStore
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import EpisodeCollector
from tests.unit.environments.snapshots import SUBMIT, Restore, agent_of, ask, run, say
from tests.unit.environments.steps import PASSES, TWO_STEPS, MakeSteps

pytestmark = pytest.mark.local

REPLIES = [run("echo one > /work/log"), SUBMIT, run("echo two >> /work/log"), SUBMIT]


@pytest.mark.parametrize("before", [1, 2, 3])
async def test_snapshots_of_any_stage(
    make_environment: Any, make_steps: MakeSteps, restore: Restore, store: Path, before: int
) -> None:
    env = TrajectoryCollectingEnvironment(make_environment(make_steps()), EpisodeCollector())
    await env.reset()
    for reply in REPLIES[:before]:
        await env.step(reply)
    snapshot = await env.export_state(store)
    for reply in REPLIES[before:]:
        last = await env.step(reply)
    again = TrajectoryCollectingEnvironment(await restore(snapshot), EpisodeCollector())
    assert len(again.past_steps) == before + 1
    await again.export_state(store, snapshot_id="second")
    for reply in REPLIES[before:]:
        other = await again.step(reply)
    assert (other.reward, again.report().rewards, again.report().stages) == (
        last.reward,
        env.report().rewards,
        env.report().stages,
    )
    assert env.trajectory is not None
    assert again.trajectory is not None
    assert [(s.observation, s.action, s.reward) for s in again.trajectory.steps] == [
        (s.observation, s.action, s.reward) for s in env.trajectory.steps
    ]
    third = await restore(store / "second")
    assert len(third.past_steps) == before + 1


async def test_a_snapshot_after_a_stage_whose_time_was_up(
    make_environment: Any, make_steps: MakeSteps, restore: Restore, store: Path
) -> None:
    env = make_environment(make_steps("[agent]\ntimeout_sec = 0.5\n" + TWO_STEPS + "[steps.agent]\ntimeout_sec = 60\n"))
    await env.reset()
    await env.step(run("echo one > /work/log; sleep 60"))
    again = await restore(await env.export_state(store))
    assert [one.truncated_by for one in again.report().stages] == ["time"]
    assert [past.time_step for past in again.past_steps] == [past.time_step for past in env.past_steps]
    assert (await again.step(SUBMIT)).reward == 0.75


async def test_forks_draw_other_values_also_in_later_stages(make_environment: Any, make_steps: MakeSteps) -> None:
    async def draw(container: Any, llm: Any) -> None:
        await llm(ask(f"drawn: {random.random()}"))

    env = make_environment(make_steps(files={"steps/one/tests/test.sh": PASSES}), agent=agent_of(draw))
    await env.reset()
    forks = await env.fork(2, diversify=True)
    try:
        drawn = {str((await fork.step(say("go on"))).observation.messages) for fork in forks}
    finally:
        for fork in forks:
            await fork.close()
    assert len(drawn) == 2


@pytest.mark.parametrize(("response", "responses"), [(say("too late"), 1), (None, 0)])
async def test_a_stage_that_ends_without_a_response_in_time_counts_its_step(
    make_environment: Any, make_steps: MakeSteps, restore: Restore, store: Path, response: Any, responses: int
) -> None:
    toml = "[agent]\ntimeout_sec = 0.3\n" + TWO_STEPS + "[steps.agent]\ntimeout_sec = 60\n"
    env = make_environment(make_steps(toml, files={"steps/one/tests/test.sh": PASSES}))
    await env.reset()
    async with asyncio.timeout(30):
        while env.time_left_sec:  # noqa: ASYNC110  # that the time is up is what it waits for
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    step = await env.step(response)
    assert (step.step_type, env.step_count) == ("MID", 1)
    snapshot = await env.export_state(store)
    assert snapshot.step_count - EpisodeFacts(snapshot).unanswered == responses
    again = await restore(snapshot)
    assert again.step_count == 1
    assert [past.action for past in again.past_steps] == [None, response]


async def test_a_broken_journal_of_a_stage_that_is_over(
    make_environment: Any, make_steps: MakeSteps, store: Path
) -> None:
    env = make_environment(make_steps(files={"steps/one/tests/test.sh": PASSES}))
    await env.reset()
    await env.step(SUBMIT)
    snapshot = await env.export_state(store)
    assert SnapshotStore(store).verify(snapshot.snapshot_id).ok
    [digest] = snapshot.episode["past_stages"][0]["journal"]
    snapshot.object_store.file(digest).write_bytes(zstd.compress(b'{"other": 1}\n'))
    assert not SnapshotStore(store).verify(snapshot.snapshot_id).ok


@pytest.mark.parametrize(
    "change",
    [
        {"name": "two"},
        {"step_count": -1},
        {"step_count": 1000},
        {"verdict": {"reward": "nan", "rewards": {}}},
        {"verdict": {"reward": 1.0, "rewards": {"reward": "inf"}}},
        {"verdict": {"reward": "much", "rewards": {}}},
        {"truncated_by": "magic"},
        {"started_at": "nan"},
        {"seed": None},
        {"journal": ["0" * 64]},
        {"journal": ["../../etc/passwd"]},
    ],
)
async def test_a_changed_stage_is_refused(
    make_environment: Any, make_steps: MakeSteps, restore: Restore, store: Path, change: dict[str, Any]
) -> None:
    env = make_environment(make_steps(files={"steps/one/tests/test.sh": PASSES}))
    await env.reset()
    await env.step(SUBMIT)
    file = (await env.export_state(store)).snapshot_dir / "snapshot.json"
    data = json.loads(file.read_text())
    data["episode"]["past_stages"][0].update(change)
    file.write_text(json.dumps(with_checksum(data)))
    with pytest.raises(SnapshotMetadataError):
        await restore(file)
