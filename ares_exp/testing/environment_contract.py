"""Conformance suite for environments. It tests the three required methods and the optional members."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import math
from collections.abc import Awaitable, Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environment import EnvironmentBase, EpisodeReport, MinimalEnvironment, TimeStep, complete
from ares_exp.errors import AresExpError, SnapshotUnsupportedError
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import Outcome
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collectors import MemoryTrajectoryCollector

TIMEOUT_SEC = 200.0
"""Time limit in seconds for one test, with up to two episodes. It is long, because the machine may be busy."""

QUIET_SEC = 0.05
"""Seconds for which a test waits to check that the pending requests of an environment do not change."""

GRACE_SEC = 10.0
"""Seconds after `close()` within which asyncio tasks that the environment has started must end."""


def closing(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Makes a coroutine an ordinary test, which runs on a new event loop and finally closes its `environment`."""

    @functools.wraps(test)
    def run(suite: EnvironmentContract, environment: MinimalEnvironment, **fixtures: Any) -> None:
        async def execute() -> None:
            try:
                await test(suite, environment, **fixtures)
            finally:
                await environment.close()

        asyncio.run(asyncio.wait_for(execute(), TIMEOUT_SEC))

    return run


class EnvironmentContract:
    """The suite for environments.

    Define the fixture `environment`, and `replies`: texts of the policy's responses, which should end the episode.
    Tests of optional members are skipped if the environment does not have these members.
    """

    replies = ("Hm.",)
    """Texts of the policy's responses. After the last response, the policy starts again with the first."""

    max_steps = 40
    """Maximum number of steps in an episode with these replies. A longer episode is closed before its end."""

    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        """Returns an environment that has not been reset."""
        raise NotImplementedError

    # Behaviour of every environment

    @closing
    async def test_episode_starts_with_first(self, environment: MinimalEnvironment) -> None:
        first = await environment.reset()
        assert isinstance(first, TimeStep)
        assert first.first()
        assert (first.reward, first.discount) == (None, None)
        assert first.observation is not None

    @closing
    async def test_episode_steps_are_valid(self, environment: MinimalEnvironment) -> None:
        steps = await self._execute(environment)
        assert steps
        for step in steps:
            assert isinstance(step, TimeStep)
            assert step.reward is None or math.isfinite(step.reward)
        for step in steps[:-1]:
            _assert_mid(step)
        if steps[-1].last():
            assert steps[-1].observation is None
            assert steps[-1].discount in (0.0, 1.0)
            assert steps[-1].reward is not None or steps[-1].discount == 1.0
        else:
            _assert_mid(steps[-1])

    @closing
    async def test_reset_mid_episode_starts_another(self, environment: MinimalEnvironment) -> None:
        await environment.reset()
        await environment.step(self._respond())
        assert (await environment.reset()).first()

    @closing
    async def test_reset_after_the_end_starts_another(self, environment: MinimalEnvironment) -> None:
        await self._execute(environment)
        assert (await environment.reset()).first()
        assert not (await environment.step(self._respond())).first()

    @closing
    async def test_step_before_the_first_reset_is_refused(self, environment: MinimalEnvironment) -> None:
        with pytest.raises(AresExpError):
            await environment.step(self._respond())

    @closing
    async def test_step_after_the_end_is_refused(self, environment: MinimalEnvironment) -> None:
        if not (await self._execute(environment))[-1].last():
            pytest.skip("the episode does not end with these replies")
        with pytest.raises(AresExpError):
            await environment.step(self._respond())

    @closing
    async def test_close_works_at_any_time(self, environment: MinimalEnvironment) -> None:
        await environment.close()
        await environment.reset()
        await environment.close()
        await environment.close()

    @closing
    async def test_close_ends_all_tasks(self, environment: MinimalEnvironment) -> None:
        before = asyncio.all_tasks()
        await environment.reset()
        await environment.step(self._respond())
        await environment.close()
        async with asyncio.timeout(GRACE_SEC):
            while not asyncio.all_tasks() <= before:  # noqa: ASYNC110 (the environment owns them)
                await asyncio.sleep(0.01)

    @closing
    async def test_context_manager_works(self, environment: MinimalEnvironment) -> None:
        async with complete(environment):
            await environment.reset()

    @closing
    async def test_same_seed_gives_the_same_task(self, environment: MinimalEnvironment) -> None:
        first, again = [
            [await self._task_name(environment, seed), await self._task_name(environment, None)] for seed in (7, 7)
        ]
        assert first == again

    @closing
    async def test_unknown_options_are_refused(self, environment: MinimalEnvironment) -> None:
        with pytest.raises((AresExpError, TypeError, ValueError)):
            await complete(environment).reset(options={"no_such_option": 1})

    @closing
    async def test_episodes_are_recorded(self, environment: MinimalEnvironment) -> None:
        collector = MemoryTrajectoryCollector()
        around = TrajectoryCollectingEnvironment(environment, collector)
        steps = await self._execute(around)
        await around.close()
        [episode] = collector.episodes
        assert around.collector_failures == 0
        assert [step.step_type for step in episode.steps] == ["FIRST", *(step.step_type for step in steps)]
        assert [step.reward for step in episode.steps] == [None, *(step.reward for step in steps)]
        ended = Outcome.COMPLETED if steps[-1].discount == 0.0 else Outcome.TRUNCATED
        assert episode.outcome == (ended if steps[-1].last() else Outcome.CLOSED)

    # Optional behaviour

    @closing
    async def test_report_follows_the_episode(self, environment: MinimalEnvironment) -> None:
        reporting = _able(environment, "report")
        reports = [reporting.report()]
        await environment.reset()
        reports.append(reporting.report())
        await environment.close()
        steps = await self._execute(environment)
        reports.append(reporting.report())
        for report in reports:
            assert isinstance(report, EpisodeReport)
            json.dumps([dict(report.rewards), dict(report.phase_sec), dict(report.lineage)], allow_nan=False)
        if steps[-1].last():
            assert (reports[-1].truncated_by is not None) == (steps[-1].discount == 1.0)
        assert not reports[-1].has_container or not steps[-1].last()

    @closing
    async def test_inspection_follows_the_episode(self, environment: MinimalEnvironment) -> None:
        shown = _able(environment, "step_count", "current_task", "time_step")
        assert (shown.step_count, shown.current_task, shown.time_step) == (0, None, None)
        first = await environment.reset()
        assert (shown.step_count, shown.time_step) == (0, first)
        assert shown.current_task is not None
        second = await environment.step(self._respond())
        assert shown.time_step == second
        assert second.last() or shown.step_count == 1

    @closing
    async def test_time_limit_can_be_extended(self, environment: MinimalEnvironment) -> None:
        timed = _able(environment, "time_left_sec", "grant_time")
        assert timed.time_left_sec is None
        await environment.reset()
        before = timed.time_left_sec
        timed.grant_time(1000.0)
        after = timed.time_left_sec
        assert (before is None) == (after is None)
        if before is not None and after is not None:
            assert after > before + 900
        step = await environment.step(None)
        assert step.last() or step.mid()
        assert not step.last() or step.discount == 1.0

    @closing
    async def test_truncate_ends_the_episode(self, environment: MinimalEnvironment) -> None:
        truncating = _able(environment, "truncate")
        await environment.reset()
        last = await truncating.truncate("steps")
        if last is None:
            assert not (await environment.step(self._respond())).first()
            return
        assert (last.step_type, last.discount, last.observation) == ("LAST", 1.0, None)
        with pytest.raises(AresExpError):
            await environment.step(self._respond())
        assert not _has(environment, "report") or truncating.report().truncated_by == "steps"

    @closing
    async def test_past_steps_are_available(self, environment: MinimalEnvironment) -> None:
        recordable = _able(environment, "activity", "past_steps")
        first = await environment.reset()
        step = await environment.step(self._respond())
        past = list(recordable.past_steps)
        if past and not step.last():
            assert [one.time_step.observation for one in past] == [first.observation, step.observation]
            assert [one.action is None for one in past] == [True, False]
        assert recordable.activity is None or recordable.activity.container_sec >= 0

    @closing
    async def test_state_can_be_exported_and_forked(self, environment: MinimalEnvironment, tmp_path: Path) -> None:
        exportable = _able(environment, "export_state", "fork")
        with pytest.raises(AresExpError):
            await exportable.export_state(tmp_path / "store")
        await environment.reset()
        try:
            snapshot = await exportable.export_state(tmp_path / "store", snapshot_id="mine")
        except SnapshotUnsupportedError as error:  # a wrapper, or an agent whose state is not accessible
            pytest.skip(str(error))
        assert (tmp_path / "store" / "mine" / "snapshot.json").is_file()
        assert (snapshot.snapshot_id, snapshot.step_count) == ("mine", 0)
        [fork] = await exportable.fork(1)
        try:
            there = await fork.step(self._respond())
        finally:
            await fork.close()
        assert there.step_type == (await environment.step(self._respond())).step_type

    @closing
    async def test_pending_requests_are_ordered(self, environment: MinimalEnvironment) -> None:
        concurrent = _able(environment, "pending_requests")
        assert concurrent.pending_requests() == ()
        first = await environment.reset()
        if not (pending := concurrent.pending_requests()):
            pytest.skip("the wrapped environment does not report its pending requests")
        assert pending[0].request == first.observation
        assert len({one.call_id for one in pending}) == len(pending)
        second = await environment.step(self._respond())
        later = concurrent.pending_requests()
        assert bool(later) != second.last()
        assert second.last() or later[0].request == second.observation
        still = [one for one in pending[1:] if one in later]
        assert [*later[: len(still)]] == still, "earlier requests must come first, in the same order"

    @closing
    async def test_changed_requests_are_announced(self, environment: MinimalEnvironment) -> None:
        announcing = concurrent = _able(environment, "changed_requests", "pending_requests")
        await environment.reset()
        if not (pending := concurrent.pending_requests()):
            pytest.skip("the wrapped environment does not report its pending requests")
        assert await announcing.changed_requests(()) == pending
        waiting = asyncio.ensure_future(announcing.changed_requests(pending))
        await asyncio.wait({waiting}, timeout=QUIET_SEC)
        assert not waiting.done(), "no request has changed"
        assert concurrent.pending_requests() == pending
        step = await environment.step(self._respond())
        assert not step.first()
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=GRACE_SEC)
        assert waiting.done()

    async def _execute(self, env: MinimalEnvironment) -> list[TimeStep[Any]]:
        """Runs an episode with `replies`, and returns the steps after FIRST."""
        await env.reset()
        steps: list[TimeStep[Any]] = []
        for reply in islice(cycle(self.replies), self.max_steps):
            steps.append(await env.step(LLMResponse.from_text(reply)))
            if steps[-1].last():
                break
        return steps

    def _respond(self) -> LLMResponse:
        return LLMResponse.from_text(self.replies[0])

    async def _task_name(self, env: MinimalEnvironment, seed: int | None) -> str:
        first = await complete(env).reset(seed=seed)
        return complete(env).report().task_name or repr(first.observation)


def _assert_mid(step: TimeStep[Any]) -> None:
    assert step.mid()
    assert step.discount == 1.0
    assert step.reward is not None
    assert step.observation is not None


def _has(environment: MinimalEnvironment, name: str) -> bool:
    default = inspect.getattr_static(EnvironmentBase, name)
    own = inspect.getattr_static(environment, name, default)
    return own is not default and (own is not None or not callable(default))


def _able(environment: MinimalEnvironment, *members: str) -> EnvironmentBase:
    for name in members:
        if not _has(environment, name):
            pytest.skip(f"it has no `{name}`")
    return complete(environment)
