"""What is kept of an episode that ends before it is scored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environments.scoring import episode_scoring as collecting
from ares_exp.errors import AgentError
from tests.unit.environments.snapshots import agent_of, ask, run, running_boxes, say
from tests.unit.environments.steps import MakeSteps

pytestmark = pytest.mark.local

HANGS = "[[verifier.collect]]\ncommand = 'touch /logs/artifacts/started; sleep 300'\ntimeout_sec = 500\n"


async def _raises(container: Any, llm: Any) -> None:
    await container.exec("echo kept > /logs/artifacts/x")
    await llm(ask())
    raise RuntimeError("on purpose")


async def test_an_agent_that_raises(make_environment: Any, make_task: Any, tmp_path: Path) -> None:
    env = make_environment(make_task(), agent=agent_of(_raises), output_dir=tmp_path)
    await env.reset()
    with pytest.raises(AgentError, match="on purpose"):
        await env.step(say("go on"))
    assert (tmp_path / "artifacts/logs/artifacts/x").read_text() == "kept\n"
    assert (tmp_path / "artifacts/manifest.json").exists()
    assert not running_boxes()


async def test_an_episode_that_is_closed(make_environment: Any, make_steps: MakeSteps, tmp_path: Path) -> None:
    env = make_environment(make_steps(), output_dir=tmp_path)
    await env.reset()
    await env.step(run("echo first > /logs/artifacts/x; echo one > /work/log"))
    await env.step(run("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    await env.step(run("echo second > /logs/artifacts/x"))
    await env.close()
    kept = [(tmp_path / f"steps/{name}/artifacts/logs/artifacts/x").read_text() for name in ("one", "two")]
    assert kept == ["first\n", "second\n"]


async def test_an_episode_that_is_cancelled(make_environment: Any, make_task: Any, tmp_path: Path) -> None:
    env = make_environment(make_task(), output_dir=tmp_path)
    await env.reset()
    await env.step(run("echo kept > /logs/artifacts/x"))
    stepping = asyncio.create_task(env.step(run("sleep 300")))
    await asyncio.sleep(0)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    assert (tmp_path / "artifacts/logs/artifacts/x").read_text() == "kept\n"
    assert not running_boxes()


async def test_it_ends_at_its_bound(
    make_environment: Any, make_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "COLLECT_SEC", 0.1)
    env = make_environment(make_task(toml=HANGS), output_dir=tmp_path)
    await env.reset()
    async with asyncio.timeout(60):
        await env.close()
    assert not running_boxes()


async def test_a_cancellation_ends_it(make_environment: Any, make_task: Any, tmp_path: Path) -> None:
    env = make_environment(make_task(toml=HANGS), output_dir=tmp_path)
    await env.reset()
    closing = asyncio.create_task(env.close())
    await asyncio.sleep(0)
    closing.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await closing
    assert not running_boxes()


async def test_nothing_is_kept_where_there_is_no_place(make_environment: Any, make_task: Any) -> None:
    env = make_environment(make_task(toml=HANGS))
    await env.reset()
    async with asyncio.timeout(60):
        await env.close()
    assert not running_boxes()


async def test_what_waits_for_the_release_is_told_even_so(
    make_environment: Any, make_task: Any, tmp_path: Path
) -> None:
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
