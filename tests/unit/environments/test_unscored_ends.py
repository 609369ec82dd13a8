"""Episodes that end, or are closed, before they are scored."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.scoring import episode_scoring as collecting
from ares_exp.environments.scoring.episode_scoring import Scoring
from ares_exp.errors import AresExpError, EpisodeStateError
from tests.unit.environments.snapshots import SUBMIT, run, running_boxes
from tests.unit.environments.steps import MakeSteps

pytestmark = pytest.mark.local

SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"


@pytest.mark.parametrize("pause_sec", [0.0, 0.03, 0.3])
async def test_separate_verifier_is_stopped(make_environment: Any, make_task: Any, pause_sec: float) -> None:
    env = make_environment(make_task(toml=SEPARATE, test="#!/bin/sh\nsleep 300\n"))
    await env.reset()
    stepping = asyncio.create_task(env.step(SUBMIT))
    async with asyncio.timeout(60):
        while env.report().phase != "verify":  # noqa: ASYNC110  # a moment in the middle of a call
            await asyncio.sleep(0.005)
        await asyncio.sleep(pause_sec)
        await env.close()
        with pytest.raises(AresExpError):
            await stepping
    assert not running_boxes()


async def test_close_at_stage_end_stops_the_container(
    make_environment: Any, make_steps: MakeSteps, tmp_path: Path
) -> None:
    env = make_environment(make_steps(), output_dir=tmp_path / "out")
    await env.reset()
    stepping = asyncio.create_task(env.step(SUBMIT))
    async with asyncio.timeout(60):
        while not (tmp_path / "out/steps/one/verifier/reward.txt").exists():  # noqa: ASYNC110  # as above
            await asyncio.sleep(0)
        await env.close()
        with pytest.raises(AresExpError):
            await stepping
    assert not running_boxes()


async def test_released_episode_creates_no_container(make_task: Any) -> None:
    task, made = make_task(toml=SEPARATE), []
    factory = LocalContainerFactory()

    def make(spec: Any) -> Any:
        made.append(spec)
        return factory(spec)

    agents = factory(task.container_spec)
    await agents.start()
    try:
        stage = task.stages[0]
        scoring = Scoring(
            stage,
            container_factory=make,
            agents_spec=task.container_spec,
            verifier_spec=stage.verifier_spec,
            timeout_sec=None,
            output_dir=None,
        )
        await scoring.release()
        with pytest.raises(EpisodeStateError):
            await scoring.run(agents, verify=True, is_last=False)
    finally:
        await agents.stop()
    assert not made


HANGS = "[[verifier.collect]]\ncommand = 'touch /logs/artifacts/started; sleep 300'\ntimeout_sec = 500\n"


async def test_closed_episode_collects_artifacts(make_environment: Any, make_steps: MakeSteps, tmp_path: Path) -> None:
    env = make_environment(make_steps(), output_dir=tmp_path)
    await env.reset()
    await env.step(run("echo first > /logs/artifacts/x; echo one > /work/log"))
    await env.step(run("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    await env.step(run("echo second > /logs/artifacts/x"))
    await env.close()
    kept = [(tmp_path / f"steps/{name}/artifacts/logs/artifacts/x").read_text() for name in ("one", "two")]
    assert kept == ["first\n", "second\n"]


async def test_cancelled_episode_collects_artifacts(make_environment: Any, make_task: Any, tmp_path: Path) -> None:
    env = make_environment(make_task(), output_dir=tmp_path)
    await env.reset()
    await env.step(run("echo kept > /logs/artifacts/x"))
    stepping = asyncio.create_task(env.step(run("sleep 300")))
    await asyncio.sleep(0)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    with pytest.raises(EpisodeStateError):
        await env.step(SUBMIT)
    assert (tmp_path / "artifacts/logs/artifacts/x").read_text() == "kept\n"
    assert not running_boxes()


async def test_collection_ends_at_its_time_limit(
    make_environment: Any, make_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "COLLECT_SEC", 0.1)
    env = make_environment(make_task(toml=HANGS), output_dir=tmp_path)
    await env.reset()
    async with asyncio.timeout(60):
        await env.close()
    assert not running_boxes()


async def test_collection_needs_an_output_directory(make_environment: Any, make_task: Any) -> None:
    env = make_environment(make_task(toml=HANGS))
    await env.reset()
    async with asyncio.timeout(60):
        await env.close()
    assert not running_boxes()


async def test_cancelled_close_still_signals_the_release(make_environment: Any, make_task: Any, tmp_path: Path) -> None:
    """The directory of a fork, say: nobody else removes it."""
    env = make_environment(make_task(toml=HANGS), output_dir=tmp_path)
    await env.reset()
    released = asyncio.Event()

    async def on_release() -> None:
        released.set()

    env.on_release = on_release
    closing = asyncio.create_task(env.close())
    await asyncio.sleep(0)
    closing.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert released.is_set()
    assert not running_boxes()
