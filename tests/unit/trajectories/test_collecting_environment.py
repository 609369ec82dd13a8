import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ares_exp.errors import AgentError, ContainerDiedError, EpisodeStateError, PolicyError, VerifierError
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import Outcome
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import TrajectoryCollector
from ares_exp.trajectories.collectors import JsonTrajectoryCollector
from ares_exp.trajectories.records import EpisodeTrajectory

RESPONSE = LLMResponse.from_text("a")


def recorded(tmp_path: Path) -> list[EpisodeTrajectory]:
    episodes = [EpisodeTrajectory.load(path) for path in tmp_path.glob("*.json")]
    return sorted(episodes, key=lambda episode: episode.start_time)


def collect(env: Any, tmp_path: Path, **more: Any) -> TrajectoryCollectingEnvironment:
    return TrajectoryCollectingEnvironment(env, JsonTrajectoryCollector(tmp_path), **more)


async def execute(env: Any) -> None:
    step = await env.reset()
    while not step.last():
        step = await env.step(RESPONSE)


async def test_completed_episode_is_recorded(tmp_path: Path, counting: Any) -> None:
    async with collect(counting(3), tmp_path, episode_id="mine") as env:
        await execute(env)
    [episode] = recorded(tmp_path)
    assert (episode.episode_id, episode.task_name, episode.outcome) == ("mine", "count", Outcome.COMPLETED)
    assert [step.step_type for step in episode.steps] == ["FIRST", "MID", "MID", "LAST"]
    assert [step.reward for step in episode.steps] == [None, 0.0, 0.0, 1.0]
    assert episode.steps[0].action is None
    assert episode.steps[-1].observation is None
    assert [len(s.observation["messages"]) for s in episode.steps if s.observation] == [1, 2, 3]


@pytest.mark.parametrize("task", ["nim_3", SimpleNamespace(name="nim_3")])
async def test_task_of_plain_environment_is_recorded(tmp_path: Path, counting: Any, task: object) -> None:
    class Shown(counting):  # type: ignore[misc]
        report = None
        step_count, time_step, current_task = 0, None, task

    async with collect(Shown(1), tmp_path) as env:
        await execute(env)
    assert [episode.task_name for episode in recorded(tmp_path)] == ["nim_3"]


async def test_truncated_episode_names_the_limit(tmp_path: Path, counting: Any) -> None:
    async with collect(counting(1, truncate=True), tmp_path) as env:
        await execute(env)
    [episode] = recorded(tmp_path)
    assert (episode.outcome, episode.truncated, episode.total_reward) == (Outcome.TRUNCATED, True, 0.5)
    assert "steps" in episode.error.message


async def test_reset_mid_episode_abandons_it(tmp_path: Path, counting: Any) -> None:
    async with collect(counting(2), tmp_path) as env:
        await env.reset()
        await execute(env)
    assert [episode.outcome for episode in recorded(tmp_path)] == [Outcome.ABANDONED, Outcome.COMPLETED]


@pytest.mark.parametrize("how", ["close", "exit"])
async def test_close_mid_episode_records_closed(tmp_path: Path, counting: Any, how: str) -> None:
    inner = counting(2)
    env = collect(inner, tmp_path)
    if how == "close":
        await env.reset()
        await env.close()
        await env.close()
    else:
        async with env:
            await env.reset()
    assert [episode.outcome for episode in recorded(tmp_path)] == [Outcome.CLOSED]
    assert inner.closed >= 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (AgentError("no"), Outcome.AGENT_ERROR),
        (ContainerDiedError("no"), Outcome.CONTAINER_ERROR),
        (VerifierError("no"), Outcome.VERIFIER_ERROR),
        (KeyError("no"), Outcome.ERRORED),
    ],
)
@pytest.mark.parametrize("where", ["reset", "step"])
async def test_error_is_recorded_and_raised_unchanged(
    tmp_path: Path, counting: Any, error: Exception, outcome: Outcome, where: str
) -> None:
    inner = counting(2, fail=error if where == "reset" else None)
    env = collect(inner, tmp_path)
    with pytest.raises(type(error)) as caught:  # noqa: PT012
        await env.reset()
        inner.fail = error
        await env.step(RESPONSE)
    assert caught.value is error
    [episode] = recorded(tmp_path)
    assert (episode.outcome, episode.task_name) == (outcome, "count")
    assert (episode.error.type, "no" in episode.error.message) == (type(error).__name__, True)
    assert episode.unfinished_step.step_index == episode.num_steps == (where == "step")


async def test_policy_error_in_the_body_is_recorded(tmp_path: Path, counting: Any) -> None:
    with pytest.raises(PolicyError):  # noqa: PT012
        async with collect(counting(2), tmp_path) as env:
            await env.reset()
            raise PolicyError("refused")
    assert [episode.outcome for episode in recorded(tmp_path)] == [Outcome.POLICY_ERROR]


@pytest.mark.parametrize("where", ["reset", "step", "body"])
async def test_cancellation_is_recorded(tmp_path: Path, counting: Any, where: str) -> None:
    inner = counting(2)
    waiting = asyncio.Event()

    async def episode() -> None:
        async with collect(inner, tmp_path) as env:
            inner.hanging = where == "reset"
            waiting.set()
            await env.reset()
            inner.hanging = where == "step"
            if where == "body":
                await asyncio.Event().wait()
            await env.step(RESPONSE)

    task = asyncio.create_task(episode())
    await waiting.wait()
    for _ in range(5):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [episode.outcome for episode in recorded(tmp_path)] == [Outcome.CANCELLED]


async def test_invalid_step_does_not_end_the_recording(tmp_path: Path, counting: Any) -> None:
    inner = counting(2)
    async with collect(inner, tmp_path) as env:
        await env.reset()
        inner.fail = EpisodeStateError("busy")
        with pytest.raises(EpisodeStateError):
            await env.step(RESPONSE)
        inner.fail = None
        await env.step(RESPONSE)
        await env.step(RESPONSE)
    assert [episode.outcome for episode in recorded(tmp_path)] == [Outcome.COMPLETED]


async def test_cancelled_close_still_closes_the_environment(tmp_path: Path, counting: Any) -> None:
    inner = counting(2)
    env = collect(inner, tmp_path)
    await env.reset()
    closing = asyncio.create_task(env.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    assert inner.closed == 1


class ForeignCollector:
    """Knows only what the protocol asks for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def begin_episode(self, *, task_name: str) -> None:
        self.calls.append(("start", task_name))

    def record_step(self, record: Any) -> None:
        self.calls.append(("step", record.step_type))

    def end_episode(self, *, truncated: bool = False) -> Any:
        self.calls.append(("end", truncated))


async def test_third_party_collector_is_called(counting: Any) -> None:
    collector = ForeignCollector()
    assert isinstance(collector, TrajectoryCollector)
    async with TrajectoryCollectingEnvironment(counting(1, truncate=True), collector) as env:
        await execute(env)
    assert env.collector_failures == 0
    assert collector.calls == [("start", "count"), ("step", "FIRST"), ("step", "LAST"), ("end", True)]


@dataclass
class Unusual:
    """An observation of somebody else's, which can be neither copied nor printed."""

    lock: Any = field(default_factory=threading.Lock)

    def __repr__(self) -> str:
        raise ValueError("no")


def endless() -> dict[str, Any]:
    holds_itself: dict[str, Any] = {}
    holds_itself["self"] = holds_itself
    return holds_itself


@pytest.mark.parametrize(
    ("action", "kept"),
    [(Unusual(), "<Unusual without a repr: ValueError>"), (endless(), "{'self': {...}}"), (b"x", "b'x'")],
)
async def test_unserializable_action_does_not_end_the_episode(
    tmp_path: Path, counting: Any, action: Any, kept: str
) -> None:
    env = collect(counting(1), tmp_path)
    await env.reset()
    assert (await env.step(action)).last()
    assert env.collector_failures == 0
    [episode] = recorded(tmp_path)
    assert episode.steps[1].action == {"value": kept}


async def test_action_of_a_failed_step_is_recorded(tmp_path: Path, counting: Any) -> None:
    inner = counting(3)
    async with collect(inner, tmp_path) as env:
        await env.reset()
        inner.fail = ContainerDiedError("gone")
        with pytest.raises(ContainerDiedError):
            await env.step(LLMResponse.from_text("rm -rf /"))
    [episode] = recorded(tmp_path)
    assert (episode.outcome, episode.num_steps) == (Outcome.CONTAINER_ERROR, 1)
    assert episode.unfinished_step.action["data"] == ({"content": "rm -rf /"},)
    assert episode.unfinished_step.step_index == 1
    assert episode.unfinished_step.policy_sec is not None
