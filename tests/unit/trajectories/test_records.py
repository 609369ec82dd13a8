import json
from pathlib import Path

import pytest

from ares_exp.errors import AgentError, TrajectoryFormatError
from ares_exp.records.results import Outcome
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector
from ares_exp.trajectories.records import (
    Ending,
    EpisodeTrajectory,
    StepRecord,
    ending,
)
from tests.unit.trajectories.chats import chat


def record(directory: Path, records: list[StepRecord], **more: object) -> EpisodeTrajectory:
    collector = JsonTrajectoryCollector(directory)
    collector.begin_episode(task_name="t", episode_id="e")
    for item in records:
        collector.record_step(item)
    return collector.end_episode(**more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "expected"),
    [(length, 1.0 if length == 3 else None) for length in range(4)],
)
def test_a_missing_reward_is_none(tmp_path: Path, length: int, expected: float | None) -> None:
    assert record(tmp_path, list(chat(length=3).steps[:length])).total_reward == expected


def step(index: int, reward: float | None, kind: str = "MID") -> StepRecord:
    return StepRecord(index, kind, None, None, reward, None if kind == "FIRST" else 1.0, 0.0)  # type: ignore[arg-type]


def test_returns_to_go(tmp_path: Path) -> None:
    trajectory = record(tmp_path, [step(0, None, "FIRST"), step(1, 1.0), step(2, None), step(3, 4.0, "LAST")])
    assert trajectory.returns_to_go() == (5.0, 4.0, 4.0)
    assert trajectory.returns_to_go(0.5) == (2.0, 2.0, 4.0)
    assert trajectory.returns_to_go(0.0) == (1.0, 0.0, 4.0)
    for discount in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="between 0 and 1"):
            trajectory.returns_to_go(discount)


def test_returns_without_a_reward_are_missing_too(tmp_path: Path) -> None:
    assert record(tmp_path, [step(0, None, "FIRST"), step(1, 1.0)]).returns_to_go() == (None,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_index", "0"),
        ("step_type", "NEXT"),
        ("reward", "1"),
        ("timestamp", None),
        ("action", [1]),
        ("discount", True),
        ("commands", [{"command": "ls", "exit_code": "0", "duration_sec": 1.0}]),
    ],
)
def test_a_field_of_the_wrong_type_is_named(name: str, value: object) -> None:
    data = json.loads(json.dumps(step(1, 0.0).to_dict()))
    assert StepRecord.from_dict(data) == step(1, 0.0)
    with pytest.raises((TypeError, ValueError), match="exit_code" if name == "commands" else name):
        StepRecord.from_dict({**data, name: value})


def test_an_error_after_the_last_step_changes_nothing() -> None:
    last = chat().steps[-1]
    assert ending(last, RuntimeError("while it closed")) == Ending(Outcome.COMPLETED, None, 1.0)
    assert ending(None, AgentError("no")).outcome is Outcome.AGENT_ERROR


@pytest.mark.parametrize("episode_id", ["../x", "a/b", "", "x" * 300])
def test_an_episode_id_that_is_no_file_name_is_refused(tmp_path: Path, episode_id: str) -> None:
    with pytest.raises(ValueError, match="episode id"):
        JsonTrajectoryCollector(tmp_path).begin_episode(task_name="a", episode_id=episode_id)


@pytest.mark.parametrize(
    ("field", "value"), [("start_time", 10**400), ("total_reward", 10**400), ("metadata", 3), ("metadata", ["a"])]
)
def test_what_nothing_can_be_computed_with_is_refused(field: str, value: object) -> None:
    data = chat(length=2).to_dict()
    with pytest.raises(TrajectoryFormatError, match=f"expected `{field}` to be a"):
        EpisodeTrajectory.from_dict({**data, field: value})
