"""Scored episodes: the container is kept for the scorers, the rewards are theirs, and nothing is left behind."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import Container
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environment import TimeStep, restart, termination, transition
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.scoring.scored_source import ScoredSource, ScoringEnvironment, ScoringRules
from ares_exp.environments.scoring.scorer import ConfiguredScorer, ScoredEpisode
from ares_exp.environments.source import EpisodeParts, SourceBase
from ares_exp.errors import ContainerError, EpisodeStateError, ScorerError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import EnvironmentUsage, Outcome
from ares_exp.tasks.harbor_task import HarborTask
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import EpisodeCollector
from tests.unit.environments.conftest import MakeTask
from tests.unit.environments.snapshots import SUBMIT, run
from tests.unit.environments.steps import MakeSteps

Seen = list[tuple[ScoredEpisode, Container | None]]


def scored(env: Any, *scorers: ConfiguredScorer, weight: float = 1.0, **parts: Any) -> ScoringEnvironment:
    given = {"limits": EpisodeLimits(), "seed": 3, **parts}
    made = EpisodeParts(container_factory=LocalContainerFactory(), code_agent_factory=ShellAgentFactory(), **given)
    return ScoringEnvironment(env, ScoringRules(scorers, weight), made)


def noting(seen: Seen, value: Any = 0.5) -> Callable[..., Any]:
    async def scorer(episode: ScoredEpisode, container: Container | None) -> Any:
        seen.append((episode, container))
        episode.spend(EnvironmentUsage(3, 2, 0.5))
        return value

    return scorer


async def reads(episode: ScoredEpisode, container: Container | None) -> float:
    return float((await container.exec("cat /answer")).output)


@pytest.mark.local
@pytest.mark.parametrize("toml", ["", "[verifier]\nenvironment_mode = 'separate'\nartifacts = ['/answer']\n"])
async def test_scorer_reads_the_container_after_the_verifier(
    make_environment: Any, make_task: MakeTask, toml: str
) -> None:
    seen: Seen = []
    inner: CodeEnvironment = make_environment(make_task(toml=toml))
    env = scored(inner, ConfiguredScorer("reads", reads, 0.5), ConfiguredScorer("noted", noting(seen), 0.0), attempt=2)
    await env.reset()
    await env.step(run("echo 42 > /answer"))
    last = await env.step(SUBMIT)
    verified = env.report().rewards["reward"]
    assert (last.step_type, last.discount, last.reward) == ("LAST", 0.0, verified + 21.0)
    assert env.report().rewards == {"reward": verified, "reads": 42.0, "noted": 0.5}
    assert env.report().environment_usage == EnvironmentUsage(3, 2, 0.5)
    assert env.report().phase_sec["score"] > 0
    [(episode, container)] = seen
    assert (episode.reward, episode.outcome, episode.attempt) == (verified, Outcome.COMPLETED, 2)
    assert episode.instruction.startswith("Write 42 to /answer.")
    assert [step.step_type for step in episode.steps] == ["FIRST", "MID", "LAST"]
    assert container is not None
    assert (env.held_container, inner.held_container, env.report().has_container) == (None, None, False)
    with pytest.raises((ContainerError, EpisodeStateError)):
        await container.exec("true")
    assert env.time_step == last
    with pytest.raises(EpisodeStateError):
        await env.step(SUBMIT)
    again = await env.reset()
    assert (again.step_type, env.report().environment_usage) == ("FIRST", None)
    await env.close()


@pytest.mark.local
async def test_multi_step_task_is_scored_once(make_environment: Any, make_steps: MakeSteps) -> None:
    seen: Seen = []
    env = scored(make_environment(make_steps()), ConfiguredScorer("x", noting(seen)))
    await env.reset()
    await env.step(run("echo one > /work/log"))
    assert (await env.step(SUBMIT)).mid()
    last = await env.step(SUBMIT)
    assert (last.reward, env.report().rewards) == (1.25, {"reward": 0.75, "lines": 0.5, "x": 0.5})
    [(episode, _)] = seen
    assert episode.instruction.split() == ["Write", "one.", "Write", "two."]


@pytest.mark.local
async def test_failing_scorer_is_a_verifier_error(make_environment: Any, make_task: MakeTask) -> None:
    async def bad(episode: ScoredEpisode, container: Container | None) -> float:
        raise KeyError("lines")

    inner = make_environment(make_task())
    collected = TrajectoryCollectingEnvironment(scored(inner, ConfiguredScorer("bad", bad)), EpisodeCollector())
    await collected.reset()
    with pytest.raises(ScorerError, match="The scorer `bad` raised KeyError: 'lines'"):
        await collected.step(SUBMIT)
    assert (collected.time_step, inner.report().has_container) == (None, False)
    trajectory = collected.trajectory
    assert (trajectory.outcome, trajectory.total_reward, trajectory.rewards) == (Outcome.VERIFIER_ERROR, None, {})


@pytest.mark.local
async def test_cancelled_scoring_releases_everything(make_environment: Any, make_task: MakeTask) -> None:
    started = asyncio.Event()

    async def waits(episode: ScoredEpisode, container: Container | None) -> float:
        started.set()
        await asyncio.sleep(60)
        return 1.0

    inner = make_environment(make_task())
    env = scored(inner, ConfiguredScorer("waits", waits))
    await env.reset()
    ending = asyncio.create_task(env.step(SUBMIT))
    await started.wait()
    assert (env.report().phase, env.report().has_container, env.time_step) == ("score", True, None)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert (env.report().has_container, env.time_step) == (False, None)


@pytest.mark.local
@pytest.mark.parametrize("verify", [True, False])
async def test_truncated_episode_is_scored(make_environment: Any, make_task: MakeTask, verify: bool) -> None:
    seen: Seen = []
    limits = EpisodeLimits(steps=1, verify_on_truncation=verify)
    env = scored(make_environment(make_task(), limits=limits), ConfiguredScorer("x", noting(seen)), limits=limits)
    await env.reset()
    last = await env.step(run("true"))
    assert (last.step_type, last.discount, last.reward) == ("LAST", 1.0, 0.5 if verify else None)
    assert [episode.trajectory.limit for episode, _ in seen] == (["steps"] if verify else [])
    assert not env.report().has_container


@pytest.mark.local
async def test_restored_episode_is_scored_completely(
    make_environment: Any, make_task: MakeTask, tmp_path: Path
) -> None:
    task: HarborTask = make_task()
    env = make_environment(task)
    async with env:
        await env.reset()
        await env.step(run("echo 42 > /answer"))
        snapshot = await env.export_state(tmp_path / "snapshots")
    seen: Seen = []
    restored = await CodeEnvironment.load_from_state(snapshot, task=task, start=False)
    again = scored(restored, ConfiguredScorer("x", noting(seen)))
    assert (await again.reset()).mid()
    last = await again.step(SUBMIT)
    assert last.reward == 1.5
    assert [step.step_type for step in seen[0][0].steps] == ["FIRST", "MID", "LAST"]
    await again.close()


class Counting:
    """An environment with three methods: three responses, or as many as there are; no container, no truncation."""

    def __init__(self, reward: float = 0.25) -> None:
        self.reward, self.steps = reward, 0

    async def reset(self) -> TimeStep[LLMRequest]:
        self.steps = 0
        return restart(LLMRequest([{"role": "user", "content": "Count."}]))

    async def step(self, action: LLMResponse) -> TimeStep[LLMRequest]:
        self.steps += 1
        if self.steps == 3:
            return termination(self.reward)
        return transition(LLMRequest([{"role": "user", "content": f"{self.steps}"}]))

    async def close(self) -> None:
        pass


ONE = LLMResponse.from_text("one")


async def test_custom_environment_without_container_is_scored() -> None:
    seen: Seen = []
    env = scored(Counting(), ConfiguredScorer("x", noting(seen, {"reward": 1.0, "more": 7})), weight=2.0)
    await env.reset()
    for _ in range(3):
        last = await env.step(ONE)
    assert (last.reward, env.report().rewards) == (1.5, {"reward": 0.25, "x": 1.0, "x.more": 7.0})
    [(episode, container)] = seen
    assert (container, episode.instruction, episode.responses) == (None, "Count.", ("one",) * 3)


@pytest.mark.parametrize(("weight", "reward"), [(1.0, None), (0.0, 0.5)])
async def test_environment_without_truncate_is_scored_at_limit(weight: float, reward: float | None) -> None:
    seen: Seen = []
    env = scored(Counting(), ConfiguredScorer("x", noting(seen)), weight=weight, limits=EpisodeLimits(steps=2))
    await env.reset()
    await env.step(ONE)
    last = await env.step(ONE)
    assert (last.step_type, last.discount, last.reward) == ("LAST", 1.0, reward)
    assert (env.report().rewards, env.report().truncated_by) == ({"x": 0.5}, "steps")
    assert seen[0][0].reward is None


async def test_invalid_reward_is_not_scored() -> None:
    seen: Seen = []
    env = scored(Counting(float("nan")), ConfiguredScorer("x", noting(seen)))
    await env.reset()
    for _ in range(3):
        last = await env.step(ONE)
    assert (last.step_type, seen) == ("LAST", [])


async def test_scorers_get_the_name_of_an_unreported_task() -> None:
    class Question:
        async def reset(self) -> TimeStep[LLMRequest]:
            return restart(LLMRequest([{"role": "user", "content": "capital?"}]))

        async def step(self, action: Any) -> TimeStep[Any]:
            return termination(1.0)

        async def close(self) -> None: ...

    class Questions(SourceBase):
        path = None

        def load(self, report: object) -> list[str]:
            return ["france"]

        def check(self, parts: object, *, report: object) -> None:
            return None

        def make(self, task_name: str, parts: EpisodeParts) -> Any:
            return Question()

    seen: Seen = []
    source = ScoredSource(Questions(), ScoringRules((ConfiguredScorer("notes", noting(seen)),)))
    made = EpisodeParts(LocalContainerFactory(), ShellAgentFactory(), limits=EpisodeLimits(), seed=3)
    async with source.make("france", made) as env:
        await env.reset()
        await env.step(LLMResponse.from_text("Paris"))
    assert [episode.task_name for episode, _ in seen] == ["france"]
