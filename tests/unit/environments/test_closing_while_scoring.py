"""An environment that is closed by another task while the work of an agent is being scored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.scoring.episode_scoring import Scoring
from ares_exp.errors import AresExpError, EpisodeStateError
from tests.unit.environments.snapshots import SUBMIT, running_boxes
from tests.unit.environments.steps import MakeSteps

pytestmark = pytest.mark.local

SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"


@pytest.mark.parametrize("pause_sec", [0.0, 0.01, 0.03, 0.1, 0.3])
async def test_a_verifier_of_its_own(make_environment: Any, make_task: Any, pause_sec: float) -> None:
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


async def test_the_end_of_a_stage(make_environment: Any, make_steps: MakeSteps, tmp_path: Path) -> None:
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


async def test_no_container_is_made_for_what_was_released(make_task: Any) -> None:
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
            await scoring.run(agents, task.container_spec.network, verify=True, is_last=False)
    finally:
        await agents.stop()
    assert not made
