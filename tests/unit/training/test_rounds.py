"""Rounds: groups of attempts for a step, refilled where they teach nothing, and on record before they are run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp import LLMRequest, LLMResponse
from ares_exp.errors import PolicyError, UserError
from ares_exp.training.curriculum import Curriculum
from ares_exp.training.rounds import Rounds, TrainingRecord
from tests.unit.training.counted_tasks import TASKS, options

RECORD = Path("training.jsonl")


class Knows:
    """Is right about `apple`, wrong about `bread`, and now right, now wrong about `cider`."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        self.asked += 1
        task = str(request.messages[0]["content"])
        if task == "broken":
            raise PolicyError("it is broken")
        is_right = task == "apple" or (task == "cider" and self.asked % 3 == 0)
        return LLMResponse.from_text("yes" if is_right else "no")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options(tmp_path / "options")


@asynccontextmanager
async def rounds(tasks: Any = TASKS, policy: Any = None, **arguments: Any) -> AsyncIterator[Rounds]:
    overrides = ["env=counted", "hydra.run.dir=run", "tracker=none"]
    async with ares_exp.driven(overrides, policy=policy or Knows(), config_dirs=["options"]) as driver:
        yield Rounds(driver, TrainingRecord(RECORD), Curriculum(tasks), group_size=4, **arguments)


async def test_round_has_groups_of_attempts() -> None:
    async with rounds() as running:
        groups = await running.execute(0, 3)
        assert sorted(group.task_name for group in groups) == [*TASKS]
        assert all(len(group.episodes) == 4 and group.is_trained for group in groups)
        again = await running.execute(1, 1)
        assert {episode.result.attempt for episode in again[0].episodes} == {4, 5, 6, 7}
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    assert [(line["kind"], line["step"], line["version"], len(line["slots"])) for line in lines] == [
        ("round", 0, "0", 12),
        ("round", 1, "0", 4),
    ]


@pytest.mark.parametrize(("what", "rounds_run"), [("keep", 1), ("drop", 1), ("refill", 3)])
async def test_groups_with_equal_rewards_are_handled_as_configured(what: Any, rounds_run: int) -> None:
    async with rounds(zero_std_groups=what, max_refills=2) as running:
        groups = await running.execute(0, 3)
        assert len(groups) == 3
        for group in groups:
            assert group.is_trained == (what == "keep" or group.task_name == "cider")
        assert len(running.record.find("round")) == rounds_run


async def test_held_out_tasks_report_rewards() -> None:
    async with rounds(["cider"]) as running:
        assert await running.evaluate(0, ["apple", "bread"], 2) == {
            "heldout/reward": 0.5,
            "heldout/reward/apple": 1.0,
            "heldout/reward/bread": 0.0,
        }


async def test_round_without_any_reward_is_refused() -> None:
    async def broken(request: LLMRequest) -> LLMResponse:
        raise PolicyError("no such model")

    async with rounds(policy=broken) as running:
        with pytest.raises(UserError, match=r"none of the 8 attempts has one\. The first one: .*no such model"):
            await running.execute(0, 2)


def test_torn_line_is_cut_off(tmp_path: Path) -> None:
    RECORD.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    TrainingRecord(RECORD).append("step", step=2)
    assert [line["step"] for line in TrainingRecord(RECORD).find("step")] == [1, 2]
