"""What scorers return, how it is called, and what the rewards of an episode add up to."""

import asyncio
import functools
import math
import threading
from typing import Any

import pytest

from ares_exp.config.hydra_setup import compose_config
from ares_exp.environments.scoring.scored_source import make_scoring_rules
from ares_exp.environments.scoring.scorer import (
    ConfiguredScorer,
    ScoredEpisode,
    ScorerBase,
    checked_score,
    combined_reward,
    named_rewards,
)
from ares_exp.errors import ConfigError, ContainerDiedError, ScorerError, ScorerTimeoutError
from ares_exp.records.results import Outcome
from ares_exp.testing.check_scorer import check_scorer, sample_episode

HERE = __name__


@pytest.mark.parametrize(
    ("returned", "value", "rewards"),
    [
        (0.5, 0.5, {"x": 0.5}),
        (True, 1.0, {"x": 1.0}),
        ({"reward": 1, "lines": 7}, 1.0, {"x": 1.0, "x.lines": 7.0}),
        ({"lines": 7}, 7.0, {"x.lines": 7.0}),
    ],
)
def test_returned_values_become_named_rewards(returned: Any, value: float, rewards: dict[str, float]) -> None:
    score = checked_score("x", 1.0, returned)
    assert (score.value, score.rewards) == (value, rewards)


@pytest.mark.parametrize(
    "returned", [None, "1", math.nan, math.inf, {}, {"a": None}, {1: 1.0}, {"a": 1, "b": 2}, [1.0], 10**400, 1j]
)
def test_invalid_reward_names_the_scorer(returned: Any) -> None:
    with pytest.raises(ScorerError, match="`x`") as raised:
        checked_score("x", 1.0, returned)
    assert (raised.value.scorer, Outcome.of(raised.value)) == ("x", Outcome.VERIFIER_ERROR)


def test_unweighted_scorer_may_return_several_values() -> None:
    assert checked_score("x", 0.0, {"a": 1, "b": 2}).value is None


def test_rewards_are_a_weighted_sum() -> None:
    scores = [checked_score("a", 0.5, 1.0), checked_score("b", 0.0, 100.0), checked_score("c", -1.0, 0.25)]
    assert combined_reward(1.0, 1.0, scores) == 1.25
    assert combined_reward(1.0, 0.0, scores) == 0.25
    assert combined_reward(None, 1.0, scores) is None, "a missing reward is never 0.0"
    assert combined_reward(None, 0.0, scores) == 0.25
    assert named_rewards(1.0, {}, scores) == {"reward": 1.0, "a": 1.0, "b": 100.0, "c": 0.25}
    assert named_rewards(1.0, {"reward": 1.0, "lines": 3}, scores[:1]) == {"reward": 1.0, "lines": 3, "a": 1.0}
    with pytest.raises(ScorerError, match="'a' of the scorer `a`"):
        named_rewards(1.0, {"a": 0.0}, scores)


def half(episode: ScoredEpisode, container: object, *, of: float = 1.0) -> float:
    return of / 2


async def later(episode: ScoredEpisode, container: object) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"reward": float(len(episode.responses))}


class Counts(ScorerBase):
    def __init__(self, *, step: int = 1) -> None:
        self.step, self.count, self.closed = step, 0, False

    async def __call__(self, episode: ScoredEpisode, container: object, /) -> float:
        self.count += self.step
        return self.count

    async def close(self) -> None:
        self.closed = True


async def test_functions_and_objects_may_be_sync_or_async() -> None:
    assert await check_scorer(half) == {"scorer": 0.5}
    assert await check_scorer(functools.partial(half, of=3.0), name="x") == {"x": 1.5}
    assert await check_scorer(later, sample_episode("a", "b")) == {"scorer": 2.0}
    assert await check_scorer(lambda episode, container: later(episode, container)) == {"scorer": 1.0}
    counts = Counts()
    assert (await check_scorer(counts), counts.closed) == ({"scorer": 1.0}, True)
    with pytest.raises(ConfigError, match="callable with an episode"):
        await check_scorer(3)


async def test_failures_are_named_and_bounded() -> None:
    def bad(episode: ScoredEpisode, container: object) -> float:
        raise SystemExit(3)

    async def died(episode: ScoredEpisode, container: object) -> float:
        raise ContainerDiedError("gone")

    async def own_timeout(episode: ScoredEpisode, container: object) -> float:
        raise TimeoutError("of its own")

    never = threading.Event()

    def hangs(episode: ScoredEpisode, container: object) -> float:
        never.wait(60)
        return 1.0

    async def sleeps(episode: ScoredEpisode, container: object) -> float:
        await asyncio.sleep(60)
        return 1.0

    with pytest.raises(ScorerError, match="`x` raised SystemExit: 3"):
        await check_scorer(bad, name="x")
    with pytest.raises(ContainerDiedError):
        await check_scorer(died)
    with pytest.raises(ScorerError, match="raised TimeoutError: of its own"):
        await check_scorer(own_timeout)
    for scorer in (hangs, sleeps):
        with pytest.raises(ScorerTimeoutError, match=r"`x` did not return within its limit of 0.05 s"):
            await check_scorer(scorer, name="x", timeout_sec=0.05)
    never.set()


def test_sample_episode_has_instruction_and_conversation() -> None:
    episode = sample_episode("ls", "done", task="List the files.")
    assert (episode.instruction, episode.responses, episode.task_name) == ("List the files.", ("ls", "done"), "sample")
    assert [one["role"] for one in episode.conversation] == ["user", "assistant", "user", "assistant"]
    assert episode.conversation[-1]["content"] == "done"
    assert sample_episode(task="Nothing yet.").conversation[0]["content"] == "Nothing yet."
    assert (sample_episode("a", reward=None).outcome, episode.outcome) == (Outcome.TRUNCATED, Outcome.COMPLETED)


def made(*overrides: str) -> tuple[tuple[ConfiguredScorer, ...], float]:
    rules = make_scoring_rules(compose_config([*overrides, "tracker=none"]))
    return tuple(rules.scorers), rules.verifier_weight


def test_scorers_are_built_from_the_config() -> None:
    assert made() == ((), 1.0)
    (first, second), weight = made(f"env.scorers=[{HERE}.half,'{HERE}:Counts']", "env.verifier_weight=0")
    assert (first.name, first.part.func, first.weight, first.timeout_sec, weight) == ("half", half, 1.0, 600.0, 0.0)
    assert (second.name, second.part.step) == ("counts", 1)
    several = f"env.scorers={{a: {{_target_: {HERE}.half, of: 4, weight: 0.5, timeout_sec: 3}}, b: null}}"
    [one] = made(several)[0]
    assert (one.name, one.weight, one.timeout_sec, one.part.keywords) == ("a", 0.5, 3.0, {"of": 4})
    [named] = made(f"env.scorers=[{{_target_: {HERE}.Counts, name: steps, step: 3}}]")[0]
    assert (named.name, named.part.step) == ("steps", 3)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("env.scorers=3", "a list or a mapping"),
        ("env.scorers=[nowhere.at.all]", "`nowhere.at.all`"),
        (f"env.scorers=[{HERE}.half,{HERE}.half]", "a unique name"),
        (f"env.scorers={{reward: {{_target_: {HERE}.half}}}}", "got 'reward'"),
        ("env.scorers={x: {weight: 1}}", "`env.scorers.x` to name a function"),
        (f"env.scorers={{x: {{_target_: {HERE}.half, off: 1}}}}", "unexpected keyword argument 'off'"),
        (f"env.scorers={{x: {{_target_: {HERE}.Counts, stepp: 1}}}}", "`stepp`"),
        (f"env.scorers={{x: {{_target_: {HERE}.half, weight: much}}}}", "`env.scorers.x.weight`"),
        (f"env.scorers={{x: {{_target_: {HERE}.half, timeout_sec: 0}}}}", "`env.scorers.x.timeout_sec`"),
        (f"env.scorers=[{HERE}.test_rewards_are_a_weighted_sum]", "to accept an episode, its container"),
    ],
)
def test_invalid_scorer_is_refused_before_the_start(override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(override)
