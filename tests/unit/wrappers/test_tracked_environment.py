"""What a tracker is told of the episodes of an environment."""

from collections.abc import Callable
from typing import Any

import pytest

from ares_exp.errors import ConfigError, EpisodeStateError
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.runs.scheduler import episode_seed
from ares_exp.trackers.tracker import NullTracker
from ares_exp.wrappers.registry import make

TAKE_3 = LLMResponse.from_text("3", usage=Usage(10, 2), cost=0.5)
TAKE_9 = LLMResponse.from_text("9")

pytestmark = pytest.mark.usefixtures("nim")


class KeepingTracker(NullTracker):
    """Keeps what it is told; with `broken`, it then raises."""

    def __init__(self, *, broken: bool = False) -> None:
        self.results: list[EpisodeResult] = []
        self.broken = broken

    def log_episode(self, result: EpisodeResult, trajectory: Any = None) -> None:
        self.results.append(result)
        if self.broken:
            raise RuntimeError("broken")


async def test_every_episode_is_tracked_with_its_end() -> None:
    tracker = KeepingTracker()
    async with make("nim", tracker=tracker) as env:
        reset: Callable[..., Any] = env.reset
        await reset(seed=5, options={"task": "nim_3"})
        await env.step(TAKE_3)
        await reset(options={"task": "nim_3"})
        with pytest.raises(RuntimeError, match="nothing like a response"):
            await env.step(Raising())
        await reset(options={"task": "nim_5"})
        await env.step(TAKE_3)
        await reset(options={"task": "nim_6"})
    told = [(one.task_name, one.attempt, one.outcome, one.reward) for one in tracker.results]
    assert told == [
        ("nim_3", 0, Outcome.COMPLETED, 1.0),
        ("nim_3", 1, Outcome.ERRORED, None),
        ("nim_5", 0, Outcome.ABANDONED, None),
        ("nim_6", 0, Outcome.CLOSED, None),
    ]
    first = tracker.results[0]
    assert (first.num_steps, first.prompt_tokens, first.generated_tokens, first.cost) == (1, 10, 2, 0.5)
    assert first.seed == episode_seed(5, "nim_3", 0)
    assert 0 <= first.phase_sec["policy"] <= first.finished_at - first.started_at
    assert len({one.episode_id for one in tracker.results}) == 4
    assert tracker.results[1].error is not None


async def test_exception_on_exit_ends_the_episode() -> None:
    tracker = KeepingTracker()

    async def fail() -> None:
        async with make("nim:0", tracker=tracker) as env:
            await env.reset()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    [result] = tracker.results
    assert (result.outcome, result.error.type if result.error else None) == (Outcome.ERRORED, "ZeroDivisionError")


async def test_failing_tracker_does_not_affect_episodes() -> None:
    tracker = KeepingTracker(broken=True)
    async with make("nim:0", tracker=tracker) as env:
        await env.reset()
        assert (await env.step(TAKE_3)).reward == 1.0
        await env.reset()
        assert (await env.step(TAKE_9)).reward == 0.0
    assert [one.reward for one in tracker.results] == [1.0, 0.0]


async def test_invalid_call_starts_no_episode() -> None:
    tracker = KeepingTracker()
    async with make("nim:0", tracker=tracker) as env:
        with pytest.raises(EpisodeStateError):
            await env.step(TAKE_3)
        reset: Callable[..., Any] = env.reset
        with pytest.raises(ConfigError, match="got 'nim_4'"):
            await reset(options={"task": "nim_4"})
        assert tracker.results == []
        await reset()
        with pytest.raises(ConfigError, match="got 'nim_4'"):
            await reset(options={"task": "nim_4"})
    assert [one.outcome for one in tracker.results] == [Outcome.ABANDONED]


class Raising(LLMResponse):
    """Cannot be read."""

    def __init__(self) -> None:
        super().__init__(())

    @property
    def text(self) -> str:
        raise RuntimeError("nothing like a response")
