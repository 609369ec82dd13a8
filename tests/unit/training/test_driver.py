"""Episodes that a trainer submits: as they finish, no further than they are taken, by version, in one run directory."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp import LLMRequest, LLMResponse
from ares_exp.errors import ConfigError
from ares_exp.policies.policy import Policy, Weights
from ares_exp.runs.control import run_control
from ares_exp.runs.control.orders import Order, write_order
from ares_exp.training.driver import EpisodeDriver
from ares_exp.trajectories.response_log import ResponseLog
from tests.conftest import rows
from tests.unit.training.counted_tasks import TASKS, Counted, options


class Responses(Policy):
    """Says `yes` while it may; its `gate` holds every response back until it is open."""

    policy_version: str | None = "0"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self._asked = asyncio.Semaphore(0)

    async def was_asked(self, times: int) -> None:
        for _ in range(times):
            await self._asked.acquire()

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        self._asked.release()
        version = self.policy_version
        await self.gate.wait()
        return LLMResponse.from_text("yes", policy_version=version)

    async def update(self, version: str, weights: Weights | None = None) -> None:
        self.policy_version = version


@pytest.fixture
def policy() -> Responses:
    return Responses()


@pytest.fixture(autouse=True)
def everything_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    options(tmp_path / "options")
    yield
    assert Counted.open_ == 0


@asynccontextmanager
async def driver(policy: Any, *overrides: str, **arguments: Any) -> AsyncIterator[EpisodeDriver]:
    place = [] if any(one.startswith("resume=") for one in overrides) else ["hydra.run.dir=run", "env=counted"]
    common = ["concurrency=2", "tracker=jsonl", *place, *overrides]
    async with ares_exp.driven(common, policy=policy, config_dirs=["options"], **arguments) as driver:
        yield driver


async def test_attempts_are_numbered_per_task(policy: Responses) -> None:
    async with driver(policy) as driving:
        first = [episode async for episode in driving.submit(["apple", "bread"], n=2)]
        second = [episode async for episode in driving.submit(["apple"], n=1)]
    assert sorted(one.slot for one in first) == [("apple", 0), ("apple", 1), ("bread", 0), ("bread", 1)]
    assert [one.slot for one in second] == [("apple", 2)]
    assert repr(second[0]).endswith(", completed, reward=1.0, versions=('0',))")
    assert all(one.reward == 1.0 and one.versions == ("0",) for one in (*first, *second))
    assert len({row["seed"] for row in rows(Path("run"))}) == len(rows(Path("run"))) == 5
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["planned"], summary["scored"], summary["mean_reward"]) == (5, 5, 1.0)


async def test_driver_does_not_run_ahead_of_consumer(policy: Responses) -> None:
    async with driver(policy) as driving:
        held, other = driving.submit(["apple"], n=8), driving.submit(["bread"], n=3)
        assert len([episode async for episode in other]) == 3  # what the first holds back delays no other
        assert [row["task_name"] for row in rows(Path("run"))].count("apple") == 2
        assert len([episode async for episode in held]) == 8


async def test_cancelled_submission_does_not_affect_others(policy: Responses) -> None:
    policy.gate.clear()
    async with driver(policy) as driving:
        first, second = driving.submit(["apple"], n=4), driving.submit(["bread"], n=1)
        await policy.was_asked(2)
        await first.cancel()
        policy.gate.set()
        assert [episode async for episode in first] == []
        assert [episode.reward async for episode in second] == [1.0]
    outcomes = sorted((row["task_name"], row["outcome"]) for row in rows(Path("run")))
    assert outcomes == [("apple", "cancelled"), ("apple", "cancelled"), ("bread", "completed")]
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["planned"], summary["scored"]) == (1, 1)  # nothing is owed that the trainer does not want


async def test_cancelled_queued_attempt_is_replaced(policy: Responses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_control, "LOOK_SEC", 0.01)
    policy.gate.clear()
    async with driver(policy) as driving:
        running, queued = driving.submit(["apple"], n=2), driving.submit(["bread"], n=1)
        await policy.was_asked(2)
        write_order(Path("run/control"), Order.new("cancel", what="bread"))
        async with asyncio.timeout(60):
            while not Path("run/control.jsonl").exists():  # noqa: ASYNC110 - a file is looked at
                await asyncio.sleep(0.01)
            policy.gate.set()
            assert [episode.slot async for episode in queued] == [("bread", 1)]
            assert len([episode async for episode in running]) == 2


async def test_queued_attempts_are_cancelled_at_the_end(policy: Responses) -> None:
    policy.gate.clear()
    async with driver(policy) as driving:
        driving.submit(["apple"], n=2)
        await policy.was_asked(2)
        driving.submit(["bread"], n=2)
    assert {row["task_name"] for row in rows(Path("run"))} == {"apple"}


async def test_incomplete_trajectory_repeats_no_responses(policy: Responses, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process dies after it has logged the result, before it has stored the trajectory and the row."""
    with monkeypatch.context() as patched:
        patched.setattr(ResponseLog, "discard", lambda _: None)
        async with driver(policy) as driving:
            [episode] = [one async for one in driving.submit(["apple"])]
    Path("run/episodes.jsonl").write_text("")
    [stored] = Path("run/trajectories").iterdir()
    stored.write_text("".join(stored.read_text().splitlines(keepends=True)[:-2]))
    policy.gate.clear()
    async with driver(policy, "resume=run") as driving:
        [again] = [one async for one in await driving.submit_again([("apple", 0)])]
    assert again.reward == episode.reward == 1.0
    assert again.trajectory is not None
    assert episode.trajectory is not None
    assert [one.action for one in again.trajectory.steps] == [one.action for one in episode.trajectory.steps]
    assert [row["retry"] for row in rows(Path("run"))] == [0, 1]


async def test_exception_in_the_body_cancels_episodes(policy: Responses) -> None:
    policy.gate.clear()

    async def leave() -> None:
        async with driver(policy) as driving:
            driving.submit(["apple"], n=4)
            await policy.was_asked(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await leave()
    assert [row["outcome"] for row in rows(Path("run"))] == ["cancelled", "cancelled"]


async def test_updated_weights_are_used_and_staleness_reported(policy: Responses) -> None:
    policy.gate.clear()
    async with driver(policy) as driving:
        submission = driving.submit(["apple"], n=1)
        await policy.was_asked(1)
        await driving.update("1")
        await driving.update("2")
        policy.gate.set()
        [episode] = [episode async for episode in submission]
        assert (episode.versions, episode.staleness) == (("0", "2"), 2)
        assert (driving.staleness.mean, driving.staleness.most, driving.staleness.refused) == (2.0, 2, 0)
        with pytest.raises(ConfigError, match="other weights already have '1'"):
            await driving.update("1")


async def test_too_stale_episode_is_run_again(policy: Responses) -> None:
    policy.gate.clear()
    async with driver(policy, max_staleness=0) as driving:
        submission = driving.submit(["apple"], n=1)
        await policy.was_asked(1)
        await driving.update("1")
        policy.gate.set()
        [episode] = [episode async for episode in submission]
        assert (episode.slot, episode.versions, episode.staleness) == (("apple", 1), ("1",), 0)
        assert driving.staleness.refused == 1
    assert len(rows(Path("run"))) == 2


async def test_training_can_be_resumed(policy: Responses) -> None:
    async with driver(policy) as driving:
        assert len([episode async for episode in driving.submit(["apple"], n=2)]) == 2
        policy.gate.clear()
        driving.submit(["bread"], n=1)
        await policy.was_asked(5)  # four for the finished ones
    policy.gate.set()
    async with driver(policy, "resume=run") as driving:
        again = await driving.submit_again([("apple", 0), ("apple", 1), ("bread", 0)])
        episodes = {episode.slot: episode async for episode in again}
        assert [one.slot async for one in driving.submit(["apple"], n=1)] == [("apple", 2)]
    assert {slot: one.reward for slot, one in episodes.items()} == {
        ("apple", 0): 1.0,
        ("apple", 1): 1.0,
        ("bread", 0): 1.0,
    }
    assert all(one.trajectory is not None and len(one.trajectory.steps) == 3 for one in episodes.values())
    ran = [(row["task_name"], row["outcome"]) for row in rows(Path("run"))]
    assert ran.count(("apple", "completed")) == 3  # two were finished, and were not run again
    assert ran.count(("bread", "completed")) == 1


async def test_unknown_task_is_refused(policy: Responses) -> None:
    async with driver(policy) as driving:
        with pytest.raises(ConfigError, match=r"There is no task 'aple' in this run\. Did you mean `apple`"):
            driving.submit(["aple"])
        with pytest.raises(ConfigError, match="at least 1 attempt per task, got 0"):
            driving.submit(TASKS, n=0)


async def test_policy_without_weights_rejects_updates() -> None:
    async def respond(request: LLMRequest) -> LLMResponse:
        return LLMResponse.from_text("no")

    async with driver(respond) as driving:
        with pytest.raises(ConfigError, match=r"The weights of .* cannot be changed"):
            await driving.update("1")
