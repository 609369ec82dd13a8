"""Exporting an episode in its middle and going on with it, in the local sandbox."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from ares_exp import errors
from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.environments import exporting
from ares_exp.environments.episode_limits import EpisodeLimits, TimeLimits
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import EpisodeCollector
from tests.agents.thorough_agent import ThoroughAgentFactory
from tests.unit.environments.snapshots import (
    SUBMIT,
    Restore,
    agent_of,
    ask,
    last_message,
    run,
    run_on,
    say,
    without_clocks,
)

pytestmark = pytest.mark.local

REPLIES = [run("echo 4 > /half; echo made"), run("echo $(cat /half)2 > /answer; rm /half"), run("ls /half"), SUBMIT]


async def test_every_step_restores_identically(make_environment: Any, restore: Restore, store: Path) -> None:
    env = TrajectoryCollectingEnvironment(make_environment(), EpisodeCollector())
    await env.reset()
    for step, reply in enumerate(REPLIES):
        await env.export_state(store, snapshot_id=f"{step}")
        await env.step(reply)
    assert env.trajectory.total_reward == 1.0
    for step in range(len(REPLIES)):
        again = TrajectoryCollectingEnvironment(await restore(store / f"{step}"), EpisodeCollector())
        await run_on(again, REPLIES)
        assert again.trajectory is not None
        assert without_clocks(again.trajectory) == without_clocks(env.trajectory), step


async def test_export_has_no_side_effects(make_environment: Any, make_task: Any, store: Path) -> None:
    replies = [say(text) for text in ("good", "echo 42 > /answer", "better", "cat /answer", "best", "done")]
    trajectories, snapshots = [], []
    for exports in (False, True):
        env = TrajectoryCollectingEnvironment(
            make_environment(make_task(f"task-{exports}"), agent=ThoroughAgentFactory(settled=True), seed=5),
            EpisodeCollector(),
        )
        await env.reset()
        for reply in replies:
            if exports:
                snapshots.append(await env.export_state(store))
            await env.step(reply)
        assert env.trajectory is not None
        trajectories.append([step[:2] for step in without_clocks(env.trajectory)])
    assert trajectories[0] == trajectories[1]
    assert [snapshot.step_count for snapshot in snapshots] == list(range(6))


async def test_snapshot_of_a_snapshot_restores(make_environment: Any, restore: Restore, store: Path) -> None:
    env = make_environment()
    await env.reset()
    for reply in REPLIES[:-1]:
        await env.step(reply)
        env = await restore(await env.export_state(store))
    assert env.step_count == 3
    assert len(env.past_steps) == 4
    assert (await env.step(SUBMIT)).reward == 1.0


async def test_thorough_agent_continues_after_restore(make_environment: Any, restore: Restore, store: Path) -> None:
    """With all its clocks, races and draws: the conversation so far is the same, to the last digit."""
    agents = ThoroughAgentFactory()
    env = make_environment(agent=agents)
    await env.reset()
    for reply in ("good", "echo 42 > /answer", "better"):
        await env.step(say(reply))
        again = await restore(await env.export_state(store), code_agent_factory=agents)
        assert again.time_step == env.time_step
    assert (await run_on(again, [say("done")] * 4)).reward == 1.0


async def test_remaining_time_is_restored(make_environment: Any, restore: Restore, store: Path) -> None:
    env = make_environment(limits=EpisodeLimits(time=TimeLimits(agent_timeout_sec=30.0)))
    await env.reset()
    await env.step(run("sleep 0.5"))
    snapshot = await env.export_state(store)
    again = await restore(snapshot)
    assert again.time_left_sec is not None
    assert again.time_left_sec <= 29.5
    spent = await restore(snapshot, limits=EpisodeLimits(time=TimeLimits(agent_timeout_sec=0.2)))
    assert spent.time_left_sec == 0.0
    last = await spent.step(SUBMIT)
    assert (last.last(), spent.truncated_by) == (True, "time")


async def test_budgets_continue_after_restore(make_environment: Any, restore: Restore, store: Path) -> None:
    env = make_environment(limits=EpisodeLimits(steps=3, cost=1.0))
    await env.reset()
    await env.step(run("true", cost=0.6))
    snapshot = await env.export_state(store)
    dear = await restore(snapshot)
    assert (await dear.step(run("true", cost=0.6))).last()
    assert dear.truncated_by == "cost"
    cheap = await restore(snapshot)
    assert (await cheap.step(run("true"))).mid()
    assert (await cheap.step(run("true"))).last()
    assert cheap.truncated_by == "steps"


async def test_abandoned_call_is_still_shown_after_restore(
    make_environment: Any, restore: Restore, store: Path
) -> None:
    async def impatient(container: Any, llm: Any) -> None:
        try:
            async with asyncio.timeout(0.05):
                await llm(ask("quick"))
        except TimeoutError:
            await llm(ask("again"))

    factory = agent_of(impatient)
    env = make_environment(agent=factory)
    await env.reset()
    await asyncio.sleep(0.2)
    again = await restore(await env.export_state(store), code_agent_factory=factory)
    assert last_message(again) == last_message(env) == "quick"
    for one in (env, again):
        assert (await one.step(say("too late"))).mid()
        assert last_message(one) == "again"
        late = await restore(await one.export_state(store), code_agent_factory=factory)
        assert [past.action and past.action.text for past in late.past_steps] == [None, "too late"]
        assert (await late.step(say("yes"))).last()


async def test_agent_finished_after_abandoned_call_is_restored(
    make_environment: Any, restore: Restore, store: Path
) -> None:
    async def hasty(container: Any, llm: Any) -> None:
        asking = asyncio.create_task(llm(ask("never mind")))
        await asyncio.sleep(0.05)
        asking.cancel()

    factory = agent_of(hasty)
    env = make_environment(agent=factory)
    await env.reset()
    await asyncio.sleep(0.2)
    again = await restore(await env.export_state(store), code_agent_factory=factory)
    assert last_message(again) == "never mind"
    for one in (env, again):
        assert (await one.step(say("?"))).discount == 0.0


async def test_agent_timers_continue_after_restore(make_environment: Any, restore: Restore, store: Path) -> None:
    async def sleeps(container: Any, llm: Any) -> None:
        async def later() -> str:
            await asyncio.sleep(0.4)
            return f"slept until {time.monotonic() >= 0.4}"

        sleeping = asyncio.create_task(later())
        await llm(ask("first"))
        await llm(ask(await sleeping))

    factory = agent_of(sleeps)
    env = make_environment(agent=factory)
    await env.reset()
    again = await restore(await env.export_state(store), code_agent_factory=factory)
    for one in (env, again):
        await one.step(say("go on"))
        assert last_message(one) == "slept until True"


async def test_export_waits_for_running_commands(make_environment: Any, restore: Restore, store: Path) -> None:
    async def works_meanwhile(container: Any, llm: Any) -> None:
        async def work() -> str:
            first = await container.exec("sleep 0.3; echo 42 > /answer; echo first")
            return str(first.output + (await container.exec("echo second")).output)

        working = asyncio.create_task(work())
        await llm(ask("meanwhile"))
        await llm(ask(await working))

    factory = agent_of(works_meanwhile)
    env = make_environment(agent=factory)
    await env.reset()
    again = await restore(await env.export_state(store), code_agent_factory=factory)
    for one in (again, env):
        await one.step(say("go on"))
        assert last_message(one) == "first\nsecond\n"
    assert (await again.step(say("done"))).reward == 1.0


async def test_export_reports_commands_that_do_not_end(
    make_environment: Any, restore: Restore, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(container: Any, llm: Any) -> None:
        working = asyncio.create_task(container.exec("sleep 60"))
        await llm(ask("busy"))
        working.cancel()
        await llm(ask("free"))

    monkeypatch.setattr(exporting, "QUIESCE_SEC", 0.2)
    factory = agent_of(busy)
    env = make_environment(agent=factory)
    await env.reset()
    with pytest.raises(errors.SnapshotBusyError, match=r"1 of the agent's calls \(exec\) did not end within 0\.2 s"):
        await env.export_state(store)
    assert not list(store.glob("*"))
    await env.step(say("go on"))
    assert last_message(await restore(await env.export_state(store), code_agent_factory=factory)) == "free"
    assert (await env.step(say("done"))).last()


async def test_export_needs_a_pending_action(make_environment: Any, store: Path) -> None:
    env = make_environment()

    async def refused(because: str) -> None:
        for call in (env.export_state(store), env.fork(2)):
            with pytest.raises(errors.SnapshotTimingError, match=because):
                await call

    await refused("has not been reset")
    resetting = asyncio.create_task(env.reset())
    await asyncio.sleep(0)
    await refused("is running")
    await resetting
    stepping = asyncio.create_task(env.step(run("sleep 1")))
    await asyncio.sleep(0.05)
    await refused("step.. is running")
    await stepping
    exporting_it = asyncio.create_task(env.export_state(store.with_name("other")))
    await asyncio.sleep(0)
    await refused("export_state.. is running")
    with pytest.raises(errors.EpisodeStateError, match="is running"):
        await env.step(SUBMIT)
    await exporting_it
    await env.step(SUBMIT)
    await refused("has ended")
    await env.reset()
    await env.close()
    await refused("ended|closed")
    assert not store.exists()


async def test_snapshot_name_must_be_new(make_environment: Any, store: Path) -> None:
    env = make_environment()
    await env.reset()
    await env.export_state(store, snapshot_id="mine")
    with pytest.raises(errors.SnapshotError, match="mine"):
        await env.export_state(store, snapshot_id="mine")
    for name in ("../out", "objects", ".hidden", ""):
        with pytest.raises((errors.SnapshotError, ValueError)):
            await env.export_state(store, snapshot_id=name)
    assert (await env.step(run("true"))).mid()


async def test_oracle_continues_after_restore(
    make_environment: Any, make_task: Any, restore: Restore, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_ANSWER", "42")
    solution = '#!/bin/sh\nsleep 0.5\necho "$ANSWER" > /answer\n'
    task = make_task(toml='[solution.env]\nANSWER = "${THE_ANSWER}"\n', solution=solution)
    env = make_environment(task, agent=ShellAgentFactory(command_timeout_sec=0.2), provide_solution=True)
    await env.reset()
    snapshot = await env.export_state(store)
    with pytest.raises(
        errors.SnapshotUnsupportedError, match="Pass `task`"
    ):  # a file alone does not open the host's variables
        await restore(snapshot)
    again, policy = await restore(snapshot, task=task), OraclePolicy()
    while not again.time_step.last():  # type: ignore[union-attr]
        await again.step(await policy(again.time_step.observation))  # type: ignore[arg-type, union-attr]
    assert again.time_step.reward == 1.0  # type: ignore[union-attr]


async def test_restored_environment_runs_further_episodes(make_environment: Any, restore: Restore, store: Path) -> None:
    env = make_environment()
    await env.reset()
    await env.step(run("echo 42 > /answer"))
    again = await restore(await env.export_state(store))
    assert (await again.reset()).first()
    assert (again.step_count, again.lineage) == (0, {})
    assert (await again.step(SUBMIT)).reward == 0.0
