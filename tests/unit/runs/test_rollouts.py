"""Episodes handed to a loop: as they finish, no further than they are taken, and everything released at its end."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp import FinishedEpisode, LLMRequest, LLMResponse
from ares_exp.environment import EpisodeReport, TimeStep, restart, termination, transition
from ares_exp.errors import ConfigError, PreflightError, UserError
from ares_exp.llms.response import Usage
from ares_exp.policies.policy import Policy
from ares_exp.records.results import Outcome

REQUEST = LLMRequest([{"role": "user", "content": "?"}])
PAID = LLMResponse.from_text("a", usage=Usage(10, 5), cost=0.25)


async def respond(request: LLMRequest) -> LLMResponse:
    return PAID


class Count:
    """Two steps. Counts its open episodes, and takes the seed as the task."""

    open_ = 0
    started = 0
    all_closed = asyncio.Event()

    def __init__(self) -> None:
        self.steps = 0
        self.seed: int | None = None
        self.is_open = False

    async def reset(self, *, seed: int | None = None) -> TimeStep[Any]:
        self.seed, self.is_open = seed, True
        Count.open_ += 1
        Count.started += 1
        return restart(REQUEST)

    async def step(self, action: Any) -> TimeStep[Any]:
        self.steps += 1
        return termination(0.5) if self.steps == 2 else transition(REQUEST)

    async def close(self) -> None:
        Count.open_ -= self.is_open
        self.is_open = False
        if Count.open_ == 0:
            Count.all_closed.set()

    def report(self) -> EpisodeReport:
        return EpisodeReport(task_name=f"count-{self.seed}", rewards={"tests": 0.5})


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Count.open_ = Count.started = 0
    Count.all_closed = asyncio.Event()
    yield
    assert Count.open_ == 0
    assert list(tmp_path.iterdir()) == []  # nothing is kept on disk


async def execute(**arguments: Any) -> list[FinishedEpisode]:
    return [episode async for episode in ares_exp.rollouts(**{"env": Count, "policy": respond, **arguments})]


async def test_episode_has_task_attempt_and_seed() -> None:
    episodes = await execute(attempts=3)
    assert sorted(episode.attempt for episode in episodes) == [0, 1, 2]
    assert len({episode.task_name for episode in episodes}) == 3  # each got a separate seed
    for episode in episodes:
        assert (episode.reward, episode.outcome, episode.error) == (0.5, Outcome.COMPLETED, None)
        assert episode.result.rewards == {"tests": 0.5}
        assert repr(episode) == f"FinishedEpisode({episode.result.episode_id!r}, completed, reward=0.5)"
        usage = episode.usage
        assert (usage.num_steps, usage.prompt_tokens, usage.generated_tokens, usage.cost) == (2, 20, 10, 0.5)
        assert (episode.result.num_steps, episode.result.cost) == (2, 0.5)
        assert episode.trajectory is not None
        assert episode.trajectory.num_steps == 3
        assert episode.trajectory.task_name == episode.task_name
        assert episode.trajectory.steps[1].action["data"][0]["content"] == "a"
    assert {episode.task_name for episode in await execute(attempts=3)} == {episode.task_name for episode in episodes}
    assert await execute(attempts=1, seed=7) != episodes


async def test_rollouts_arrive_as_they_finish() -> None:
    gates = [asyncio.Event() for _ in range(3)]

    class Gated(Policy):
        def for_episode(self, episode: Any) -> Any:
            async def respond(request: LLMRequest) -> LLMResponse:
                await gates[episode.attempt].wait()
                return PAID

            return respond

    order = []
    gates[2].set()
    async for episode in ares_exp.rollouts(env=Count, policy=Gated(), attempts=3, concurrency=3):
        order.append(episode.attempt)
        gates[(episode.attempt + 2) % 3].set()
    assert order == [2, 1, 0]


async def test_rollouts_start_at_most_concurrency_ahead() -> None:
    ahead = []
    async with aclosing(ares_exp.rollouts(env=Count, policy=respond, attempts=20, concurrency=3)) as episodes:
        taken = 0
        async for _ in episodes:
            taken += 1
            for _ in range(200):  # whatever can be run meanwhile is run
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            ahead.append(Count.started - taken)
    assert taken == 20
    assert max(ahead) == 3
    assert min(ahead[:-3]) == 3


async def test_failures_become_outcomes() -> None:
    async def fail_at_first(request: LLMRequest, seen: list[int] = []) -> LLMResponse:  # noqa: B006
        seen.append(1)
        if len(seen) == 1:
            raise KeyError("x")
        if len(seen) == 2:
            raise asyncio.CancelledError
        return PAID

    episodes = await execute(policy=fail_at_first, attempts=3, concurrency=1)
    assert [episode.outcome.value for episode in episodes] == ["policy_error", "cancelled", "completed"]
    assert [episode.reward for episode in episodes] == [None, None, 0.5]
    assert episodes[0].error is not None
    assert "KeyError" in episodes[0].error.message
    assert episodes[0].trajectory is not None
    [broken] = await execute(env=lambda: 1 / 0)
    assert (broken.outcome, broken.trajectory, broken.task_name) == (Outcome.ERRORED, None, "environment")
    [wrong] = await execute(env=dict)
    assert wrong.error is not None
    assert "to make an environment" in wrong.error.message


async def test_limits_apply() -> None:
    [episode] = await execute(overrides=["limits.steps=1"])
    assert (episode.outcome, episode.result.limit) == (Outcome.TRUNCATED, "steps")


class Waiting(Policy):
    """Answers the first episode, and no other."""

    def __init__(self) -> None:
        self.waiting = 0
        self.closed = 0
        self.three_wait = asyncio.Event()

    def for_episode(self, episode: Any) -> Any:
        async def respond(request: LLMRequest) -> LLMResponse:
            if episode.attempt > 0:
                self.waiting += 1
                if self.waiting == 3:
                    self.three_wait.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.waiting -= 1
            return PAID

        return respond

    async def close(self) -> None:
        self.closed += 1


async def test_break_releases_everything() -> None:
    policy = Waiting()
    async for _ in ares_exp.rollouts(env=Count, policy=policy, attempts=4):
        break
    await Count.all_closed.wait()  # the loop has it closed as soon as nothing refers to it
    assert (policy.waiting, policy.closed) == (0, 0)  # an object stays its owner's to close


async def test_cancelling_the_consumer_releases_everything() -> None:
    policy = Waiting()
    running = asyncio.create_task(execute(policy=policy, attempts=4))
    await policy.three_wait.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (policy.waiting, Count.open_) == (0, 0)


def test_end_of_the_program_releases_everything() -> None:
    policy = Waiting()

    async def main() -> Any:
        episodes = ares_exp.rollouts(env=Count, policy=policy, attempts=4)
        await anext(episodes)
        return episodes

    asyncio.run(main())
    assert (policy.waiting, Count.open_) == (0, 0)


@pytest.mark.local
async def test_parts_may_be_contents_of_option_files() -> None:
    replies = ["```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"]
    [episode] = await execute(
        env={"_target_": "ares_exp.environments.harbor.HarborEnvironments", "tasks": ["write-greeting"]},
        policy={"_target_": "ares_exp.policies.scripted.ScriptedPolicy", "replies": replies},
    )
    assert (episode.task_name, episode.reward, episode.usage.num_steps) == ("write-greeting", 0.0, 1)


@pytest.mark.local
async def test_scorers_may_be_option_names() -> None:
    judge = [
        "scorer=judge",
        "policy@scorer.policy=scripted",
        'scorer.policy.replies=["Score: 8"]',
    ]
    replies = ["```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"]
    policy = {"_target_": "ares_exp.policies.scripted.ScriptedPolicy", "replies": replies}
    [episode] = await execute(env="harbor", policy=policy, overrides=[*judge, "env.tasks=[write-greeting]"])
    assert episode.result.rewards == {"reward": 0.0, "judge": 0.8}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"env": "harbr"}, "harbor"),
        ({"env": Count()}, r"got an environment \(Count\)"),
        ({"env": 5}, "got int"),
        ({"policy": 5}, "callable"),
        ({"policy": {"replies": []}}, "_target_"),
        ({"attempts": 0}, "Expected `attempts` to be at least 1"),
        ({"concurrency": "x"}, "concurrency"),
        ({"overrides": ["attempts=2"]}, "`attempts` is an argument"),
        ({"overrides": ["policy.model=m"]}, "Pass the value to its constructor"),
        (
            {"overrides": ["scorer=judge"], "env": Count},
            "`scorer` has no effect because `env` is a type, not an option",
        ),
        ({"overrides": ["tracker=none"]}, "has no effect here"),
        ({"overrides": ["resume=x"]}, "has no effect here"),
        ({"overrides": ["limits.stps=2"]}, "limits.steps"),
        ({"overrides": "limits.steps=2"}, "Expected a list of overrides"),
    ],
)
async def test_mistakes_are_raised(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        await execute(**arguments)


async def test_missing_requirements_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(PreflightError, match="OPENAI_API_KEY"):
        await execute(policy="openai", overrides=["policy.model=m"])
    with pytest.raises(UserError, match="/nowhere"):
        await execute(env="harbor", overrides=["env.path=/nowhere"])
