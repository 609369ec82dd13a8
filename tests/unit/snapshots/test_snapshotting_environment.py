"""Snapshots of episodes in the real local sandbox, as a schedule takes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import as_container_factory
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.harbor import HarborEnvironments
from ares_exp.environments.source import as_source
from ares_exp.errors import ConfigError, PolicyError
from ares_exp.llms.response import LLMResponse
from ares_exp.runs.components import check_snapshots
from ares_exp.snapshots.schedule import NoSnapshots, SnapshotSchedule, SnapshottingEnvironment
from ares_exp.snapshots.store import SnapshotStore
from ares_exp.tasks.harbor_task import load_task
from ares_exp.tasks.task_set import SAMPLES

Make = Callable[..., SnapshottingEnvironment]


def run(command: str) -> LLMResponse:
    return LLMResponse.from_text(f"```bash\n{command}\n```\n")


GREET = run("echo 'Hello, harbor!' > /app/greeting.txt")
LOOK = run("ls /app")
SUBMIT = run("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def code_environment() -> CodeEnvironment:
    return CodeEnvironment(
        [load_task(SAMPLES / "write-greeting")],
        container_factory=LocalContainerFactory(),
        code_agent_factory=ShellAgentFactory(command_timeout_sec=20),
    )


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes environments whose snapshots go to `store`; closes them after the test."""
    made: list[SnapshottingEnvironment] = []

    def new(schedule: SnapshotSchedule | None = None, *, env: Any = None, **options: Any) -> SnapshottingEnvironment:
        schedule = schedule or SnapshotSchedule(tmp_path / "store", **{"every": 1, **options})
        made.append(SnapshottingEnvironment(env or code_environment(), schedule, episode_id="episode"))
        return made[-1]

    yield new
    await asyncio.gather(*(env.close() for env in made))


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "store")


def objects(store: SnapshotStore) -> list[Path]:
    return [path for path in (store.path / "objects").rglob("*") if path.is_file()]


async def execute(env: SnapshottingEnvironment, *responses: LLMResponse) -> Any:
    time_step = await env.reset()
    for response in responses:
        time_step = await env.step(response)
    return time_step


@pytest.mark.local
async def test_every_waiting_step_has_a_snapshot(make: Make, store: SnapshotStore) -> None:
    env = make()
    last = await execute(env, GREET, LOOK, SUBMIT)
    assert (last.step_type, last.reward) == ("LAST", 1.0)
    assert env.snapshots == store.ids() == ["episode@0", "episode@1", "episode@2"]
    assert [store.get(name).step_count for name in env.snapshots] == [0, 1, 2]
    assert all(store.verify(name).ok for name in env.snapshots)
    assert [len(store.get(name).agent_messages) for name in env.snapshots] == [1, 3, 5]
    assert env.snapshot_failures == 0
    assert set(env.report().phase_sec) == {"start", "agent", "verify", "snapshot"}


@pytest.mark.local
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"every": 2}, ["episode@0", "episode@2"]),
        ({"keep": 2}, ["episode@1", "episode@2"]),
        ({"every": None}, []),
        ({"keep": 1, "success_reward": 1.0}, ["episode@2"]),
        ({"success_reward": 0.0}, []),
    ],
)
async def test_failed_episode_keeps_selected_snapshots(
    make: Make, store: SnapshotStore, options: dict[str, Any], kept: list[str]
) -> None:
    env = make(**options)
    last = await execute(env, LOOK, LOOK, SUBMIT)
    assert last.reward == 0.0
    assert env.snapshots == store.ids() == kept


@pytest.mark.local
async def test_snapshots_of_a_success_are_deleted(make: Make, store: SnapshotStore, tmp_path: Path) -> None:
    schedule = SnapshotSchedule(tmp_path / "store", every=1, keep=1, success_reward=1.0)
    success, failure = make(schedule), make(schedule)
    assert (await execute(success, GREET, SUBMIT)).reward == 1.0
    assert (await execute(failure, run("seq 1 20000 > /app/mine"), SUBMIT)).reward == 0.0
    assert (success.snapshots, failure.snapshots) == ([], ["episode@1"])
    before = len(objects(store))
    schedule.collect_garbage()
    assert 0 < len(objects(store)) < before
    assert store.ids() == ["episode@1"]
    assert store.verify("episode@1").ok


@pytest.mark.local
async def test_snapshot_is_taken_while_the_policy_thinks(make: Make, store: SnapshotStore) -> None:
    env = make()
    await env.reset()
    assert store.ids() == [], "reset() has waited for it"
    await env.wait_for_snapshot()  # the policy, thinking longer than that
    assert store.ids() == ["episode@0"]
    await env.step(LOOK)
    assert store.ids() == ["episode@0"], "step() has waited for the next one"
    await env.step(LOOK)
    assert store.ids() == ["episode@0", "episode@1"], "step() has not waited for that of before"


@pytest.mark.local
async def test_second_episode_has_a_separate_name(make: Make, store: SnapshotStore) -> None:
    env = make()
    await execute(env, LOOK)
    await env.reset()
    await env.close()
    [name] = env.snapshots
    assert name.endswith("@0")
    assert sorted([name, "episode@0", "episode@1"]) == store.ids()


@pytest.mark.local
@pytest.mark.parametrize("error", [PolicyError("no response"), None])
async def test_last_snapshot_survives_the_episode(make: Make, store: SnapshotStore, error: Exception | None) -> None:
    env = make(keep=1, success_reward=1.0)
    try:
        async with env:
            await execute(env, LOOK)
            if error is not None:
                raise error
    except PolicyError:
        pass
    assert env.snapshots == store.ids() == ["episode@1"]


@pytest.mark.local
async def test_unwritable_store_does_not_affect_the_episode(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").write_text("a file")
    schedule = SnapshotSchedule(tmp_path / "store", every=1)
    for _ in range(2):
        env = make(schedule)
        assert (await execute(env, GREET, SUBMIT)).reward == 1.0
        assert (env.snapshots, env.snapshot_failures) == ([], 2)
    [warned] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(tmp_path / "store") in warned.message


@pytest.mark.local
async def test_slow_snapshot_is_cancelled(make: Make, store: SnapshotStore, caplog: pytest.LogCaptureFixture) -> None:
    env = make(timeout_sec=1e-6)
    await execute(env, GREET)
    await env.wait_for_snapshot()
    assert (env.snapshots, env.snapshot_failures, store.ids()) == ([], 2, [])
    assert "snapshot.timeout_sec=1e-06" in caplog.text
    assert (await env.export_state(store.path, snapshot_id="mine")).step_count == 1
    assert (await env.step(SUBMIT)).reward == 1.0


class Announcing:
    """The environment, which tells when an export has started."""

    def __init__(self, env: CodeEnvironment) -> None:
        self._env, self.started = env, asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    async def __aenter__(self) -> Announcing:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._env.__aexit__(*exc)

    async def export_state(self, *args: Any, **options: Any) -> Any:
        self.started.set()
        return await self._env.export_state(*args, **options)


@pytest.mark.local
@pytest.mark.parametrize("turns", [0, 1, 3, 10, 30])
async def test_cancelled_snapshot_leaves_no_files(make: Make, store: SnapshotStore, turns: int) -> None:
    announcing = Announcing(code_environment())
    env = make(env=announcing)

    async def episode() -> None:
        async with env:
            await env.reset()
            await asyncio.Event().wait()

    running = asyncio.create_task(episode())
    await announcing.started.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert store.ids() == env.snapshots
    assert all(store.verify(name).ok for name in store.ids())
    assert env.snapshot_failures == 0
    assert [task for task in asyncio.all_tasks() if task.get_name() == "snapshot"] == []
    assert not list(store.path.glob(".tmp-*"))


@pytest.mark.local
async def test_cancelled_step_does_not_break_the_episode(make: Make, store: SnapshotStore) -> None:
    announcing = Announcing(code_environment())
    env = make(env=announcing)
    await env.reset()
    await announcing.started.wait()
    stepping = asyncio.create_task(env.step(GREET))
    await asyncio.sleep(0)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    assert env.time_step.step_type == "FIRST", "the response was applied although its step was cancelled before"
    await env.step(GREET)
    assert (await env.step(SUBMIT)).reward == 1.0


@pytest.mark.local
async def test_requested_snapshot_is_taken_at_next_wait(make: Make, store: SnapshotStore) -> None:
    env = make(every=None)
    env.request_snapshot()  # before the episode
    await env.reset()
    await env.wait_for_snapshot()
    assert store.ids() == ["episode@0"]
    stepping = asyncio.create_task(env.step(LOOK))
    await asyncio.sleep(0)
    env.request_snapshot()  # during a step
    await stepping
    await env.wait_for_snapshot()
    assert store.ids() == ["episode@0", "episode@1"]
    await env.step(LOOK)
    await asyncio.to_thread(env.request_snapshot)  # while the policy thinks, and from another thread
    await asyncio.sleep(0)
    await env.step(LOOK)
    assert env.snapshots == store.ids() == ["episode@0", "episode@1", "episode@2"]


@pytest.mark.local
async def test_manual_export_uses_the_same_store(make: Make, store: SnapshotStore, tmp_path: Path) -> None:
    env = make(every=None)
    await execute(env, LOOK)
    assert (await env.export_state()).snapshot_id == "episode@1"
    assert env.snapshots == store.ids() == ["episode@1"]
    elsewhere = await env.export_state(tmp_path / "elsewhere")
    assert elsewhere.snapshot_dir.parent == tmp_path / "elsewhere"
    assert env.snapshots == ["episode@1"]


@pytest.mark.parametrize(
    "options",
    [
        {"every": 0},
        {"every": 1, "keep": 0},
        {"every": 1, "success_reward": float("nan")},
        {"every": 1, "timeout_sec": 0},
    ],
)
def test_invalid_schedule_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SnapshotSchedule(Path("store"), **options)


@pytest.mark.local
@pytest.mark.parametrize("every", [1, None])
def test_unsupported_capture_is_refused(every: int | None) -> None:
    schedule, source = SnapshotSchedule(Path("store"), every=every), HarborEnvironments()
    mine = as_container_factory(SimpleNamespace(name="mine"))

    def check(source: Any, containers: Any, snapshots: Any = schedule) -> None:
        parts: Any = SimpleNamespace(
            source=source, container_factory=containers, effective_agent=ShellAgentFactory(), snapshots=snapshots
        )
        check_snapshots(parts)

    check(source, LocalContainerFactory())
    check(source, DockerContainerFactory())
    with pytest.raises(ConfigError, match="keep_image=true"):
        check(source, DockerContainerFactory(keep_image=False))
    with pytest.raises(ConfigError, match="container=mine cannot"):
        check(source, mine)
    with pytest.raises(ConfigError, match="exports_state"):
        check(as_source(SimpleNamespace()), LocalContainerFactory())
    check(as_source(SimpleNamespace()), mine, NoSnapshots())
