"""Snapshots of tasks with several stages, and the isolation of stages, agents and episodes."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.filesystem.zstd import zstd
from ares_exp.containers.local.isolation import is_privileged
from ares_exp.environments.restoring import EpisodeFacts
from ares_exp.errors import SnapshotMetadataError
from ares_exp.snapshots.snapshot import with_checksum
from ares_exp.snapshots.store import SnapshotStore
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import EpisodeCollector
from tests.unit.environments.snapshots import SUBMIT, Restore, agent_of, ask, last_message, run, say
from tests.unit.environments.steps import DOCKERFILE, FIRST, PASSES, TWO_STEPS, MakeSteps

pytestmark = pytest.mark.local

REPLIES = [run("echo one > /work/log"), SUBMIT, run("echo two >> /work/log"), SUBMIT]


@pytest.mark.parametrize("before", [1, 2, 3])
async def test_any_stage_can_be_restored(
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
    assert [(s.observation, s.action, s.reward) for s in again.trajectory.steps] == [
        (s.observation, s.action, s.reward) for s in env.trajectory.steps
    ]
    third = await restore(store / "second")
    assert len(third.past_steps) == before + 1


async def test_snapshot_after_a_timed_out_stage_restores(
    make_environment: Any, make_steps: MakeSteps, restore: Restore, store: Path
) -> None:
    env = make_environment(make_steps("[agent]\ntimeout_sec = 0.5\n" + TWO_STEPS + "[steps.agent]\ntimeout_sec = 60\n"))
    await env.reset()
    await env.step(run("echo one > /work/log; sleep 60"))
    again = await restore(await env.export_state(store))
    assert [one.truncated_by for one in again.report().stages] == ["time"]
    assert [past.time_step for past in again.past_steps] == [past.time_step for past in env.past_steps]
    assert (await again.step(SUBMIT)).reward == 0.75


async def test_forks_draw_different_values_in_later_stages(make_environment: Any, make_steps: MakeSteps) -> None:
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
async def test_stage_without_timely_response_counts_its_step(
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
    assert snapshot.step_count - EpisodeFacts.of(snapshot).unanswered == responses
    again = await restore(snapshot)
    assert again.step_count == 1
    assert [past.action for past in again.past_steps] == [None, response]


async def test_broken_journal_of_past_stage_is_found(make_environment: Any, make_steps: MakeSteps, store: Path) -> None:
    env = make_environment(make_steps(files={"steps/one/tests/test.sh": PASSES}))
    await env.reset()
    await env.step(SUBMIT)
    snapshot = await env.export_state(store)
    assert SnapshotStore(store).verify(snapshot.snapshot_id).ok
    [digest] = snapshot.episode["past_stages"][0]["journal"]
    snapshot.object_store.file(digest).write_bytes(zstd.compress(b'{"other": 1}\n'))
    assert not SnapshotStore(store).verify(snapshot.snapshot_id).ok


CHANGES: list[dict[str, Any]] = [
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
]


async def test_changed_stage_is_refused(
    make_environment: Any, make_steps: MakeSteps, restore: Restore, store: Path
) -> None:
    env = make_environment(make_steps(files={"steps/one/tests/test.sh": PASSES}))
    await env.reset()
    await env.step(SUBMIT)
    file = (await env.export_state(store)).snapshot_dir / "snapshot.json"
    text = file.read_text()
    for change in CHANGES:
        data = json.loads(text)
        data["episode"]["past_stages"][0].update(change)
        file.write_text(json.dumps(with_checksum(data)))
        with pytest.raises(SnapshotMetadataError):
            await restore(file)


SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"


@pytest.mark.parametrize("folder", ["/tests", "/logs/verifier"])
async def test_link_replacing_logs_receives_no_verification_files(
    make_environment: Any, make_steps: MakeSteps, folder: str
) -> None:
    env = make_environment(make_steps())
    await env.reset()
    await env.step(run(f"echo one > /work/log; mkdir /stash; rm -rf {folder}; ln -s /stash {folder}"))
    between = await env.step(SUBMIT)
    assert "Write two." in str(between.observation.messages)
    await env.step(run("ls -A /stash; echo listed"))
    assert "listed" in last_message(env)
    assert "test" not in last_message(env).partition("<output>")[2]
    assert (await env.step(SUBMIT)).reward == 0.75


async def test_earlier_artifacts_reach_no_verifier(make_environment: Any, make_task: Any, tmp_path: Path) -> None:
    test = "#!/bin/sh\nls -A /logs/artifacts /data 2>/dev/null | grep -c old > /logs/verifier/reward.txt\n"
    env = make_environment(make_task(toml="artifacts = ['/data']\n" + SEPARATE, test=test), output_dir=tmp_path / "out")
    rewards = []
    for commands in ("touch /logs/artifacts/old; mkdir /data; touch /data/old", "mkdir /data; touch /data/new"):
        await env.reset()
        await env.step(run(commands))
        rewards.append((await env.step(SUBMIT)).reward)
    assert rewards == [2.0, 0.0]
    assert not list((tmp_path / "out").rglob("old"))


@pytest.mark.parametrize("kept", ["artifacts/first", "verifier/first"])
async def test_cancelled_verification_redacts_secrets(
    make_environment: Any, make_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", "sk-the-very-secret")
    toml = (
        "artifacts = ['/first', '/a', '/b', '/c']\n[verifier.env]\nSERVICE_API_KEY = '${SERVICE_API_KEY}'\n"
        "[[verifier.collect]]\ncommand = 'echo sk-the-very-secret > /first'\n"
    )
    test = "#!/bin/sh\ncp /first /logs/verifier; echo 1 > /logs/verifier/reward.txt\n"
    env = make_environment(make_task(toml=toml, test=test), output_dir=tmp_path / "out")
    await env.reset()
    stepping = asyncio.create_task(env.step(SUBMIT))
    file = tmp_path / "out" / kept
    async with asyncio.timeout(30):
        while not file.exists():  # noqa: ASYNC110  # a moment in the middle of a call
            await asyncio.sleep(0)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    assert "very-secret" not in file.read_text()


async def test_secrets_are_redacted_across_stages(
    make_environment: Any, make_steps: MakeSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", "sk-the-very-secret")
    toml = (
        "[[steps]]\nname = 'one'\n[steps.verifier.env]\nSERVICE_API_KEY = '${SERVICE_API_KEY}'\n"
        "[[steps]]\nname = 'two'\n"
    )
    leaks = "#!/bin/sh\necho $SERVICE_API_KEY > /work/log; echo 1 > /logs/verifier/reward.txt\n"
    env = make_environment(make_steps(toml, files={"steps/one/tests/test.sh": leaks}), output_dir=tmp_path / "out")
    await env.reset()
    await env.step(SUBMIT)
    await env.step(run("cp /work/log /logs/artifacts/key"))
    await env.step(SUBMIT)
    kept = (tmp_path / "out" / "steps" / "two" / "artifacts" / "logs" / "artifacts" / "key").read_text()
    assert kept.strip()
    assert "very-secret" not in kept


@pytest.mark.skipif(not is_privileged(), reason="local containers of an ordinary user have only one user")
async def test_next_agent_can_write_to_logs(make_environment: Any, make_steps: MakeSteps) -> None:
    modes = "stat -c '%U %a %n' /logs /logs/*"
    files = {
        "environment/Dockerfile": f"{DOCKERFILE}RUN chmod 777 . && mkdir -m 775 /logs && chown nobody:games /logs\n",
        "steps/one/tests/test.sh": f"{FIRST}{modes}\n",
    }
    users = "[agent]\nuser = 'nobody'\n[verifier]\nuser = 'games'\n"
    env = make_environment(make_steps(users + TWO_STEPS, files=files))
    await env.reset()
    await env.step(run(f"{modes} >before; echo one >log"))
    await env.step(SUBMIT)
    await env.step(run(f"cd /logs && touch verifier/x agent/x x && rm x && {modes} | diff /work/before -"))
    assert "<exit_code>0</exit_code>" in last_message(env)
    await env.step(run("cat before"))
    assert "nobody 775 /logs\nroot 777 /logs/agent" in last_message(env)
    assert (await env.step(SUBMIT)).reward == 0.75
