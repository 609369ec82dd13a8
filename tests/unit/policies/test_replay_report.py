"""The report of a replay: its JSON, and its text on terminals of any kind."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from ares_exp.policies.replay_report import ReplayedEpisode, ReplayReport
from ares_exp.records.results import Outcome
from ares_exp.trajectories.request_diff import Match, StepComparison


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def episode(task: str, attempt: int, *matches: Match, reward: float | None = 1.0) -> ReplayedEpisode:
    return ReplayedEpisode(
        task_name=task,
        attempt=attempt,
        recorded_id=f"{task}-then",
        episode_id=f"{task}-now-{attempt}",
        recorded_outcome=Outcome.COMPLETED,
        outcome=Outcome.COMPLETED if reward is not None else Outcome.POLICY_ERROR,
        recorded_reward=1.0,
        reward=reward,
        steps=tuple(StepComparison(number, match) for number, match in enumerate(matches)),
    )


def report(*episodes: ReplayedEpisode) -> ReplayReport:
    return ReplayReport(Path("outputs/first"), ("durations",), episodes)


def text(made: ReplayReport, encoding: str = "utf-8") -> str:
    buffer = io.BytesIO()
    with io.TextIOWrapper(buffer, encoding=encoding) as stream:
        made.render(stream)
        return buffer.getvalue().decode(encoding)


EXACT, NORMALISED, DIFFERENT, EXTRA, MISSED = (
    Match.EXACT,
    Match.NORMALISED,
    Match.DIFFERENT,
    Match.EXTRA,
    Match.NOT_REACHED,
)


def test_a_score_is_of_steps() -> None:
    made = report(
        episode("b", 0, EXACT, NORMALISED, DIFFERENT), episode("a", 1, EXACT), episode("a", 0, EXACT, MISSED, MISSED)
    )
    data = json.loads(json.dumps(made.to_dict()))
    assert (data["score"], data["matching_steps"], data["compared_steps"]) == (4 / 7, 4, 7)
    assert data["tasks"] == {
        "a": {"score": 0.5, "matching_steps": 2, "compared_steps": 4},
        "b": {"score": 2 / 3, "matching_steps": 2, "compared_steps": 3},
    }
    assert [(one["task_name"], one["attempt"]) for one in data["episodes"]] == [("a", 0), ("a", 1), ("b", 0)]
    assert data["episodes"][2]["steps"][2] == {"step": 2, "match": "different"}
    assert data["episodes"][0]["reward"] == {"recorded": 1.0, "now": 1.0}


def test_adjacent_steps_are_grouped() -> None:
    shown = text(report(episode("a", 0, EXACT, EXACT, EXACT, DIFFERENT, NORMALISED, MISSED, MISSED)))
    assert "a-then, attempt 0: steps 0-2 exact, 3 different, 4 normalised, 5-6 not reached" in shown
    assert "Determinism 0.57: 4 of 7 steps match." in shown


def test_the_table_omits_empty_columns() -> None:
    assert "extra" not in text(report(episode("a", 0, EXACT)))
    assert "extra" in text(report(episode("a", 0, EXACT, EXTRA)))
    assert "not reached" in text(report(episode("a", 0, EXACT, MISSED)))
    assert max(map(len, text(report(episode("task" * 30, 0, EXACT, EXTRA, MISSED))).splitlines()[:8])) <= 80


def test_different_rewards_and_endings_are_shown() -> None:
    shown = text(report(episode("a", 0, EXACT, reward=0.5)))
    assert "1.00 -> 0.50" in shown
    assert "reward 0.50; recorded was 1.00" in shown
    shown = text(report(episode("a", 0, EXACT, reward=None)))
    assert "1.00 -> -" in shown
    assert "ended as policy_error; recorded was completed" in shown


def test_rounding_never_hides_a_difference() -> None:
    assert "Determinism 0.99: 999 of 1000" in text(report(episode("a", 0, *[EXACT] * 999, DIFFERENT)))
    assert "Determinism 0.01: 1 of 1000" in text(report(episode("a", 0, EXACT, *[DIFFERENT] * 999)))


def test_nothing_was_compared() -> None:
    assert report().to_dict()["score"] is None
    assert "no step could be compared" in text(report())


def test_a_difference_cannot_command_the_terminal() -> None:
    first = StepComparison(0, Match.DIFFERENT, "message 0 (\x1b[2J)", diff=("-a\x1b[31m", "+[red]b[/red]"))
    made = report(ReplayedEpisode("\x1b[1mt", 0, "id\n", "n", Outcome.COMPLETED, Outcome.COMPLETED, 1.0, 1.0, (first,)))
    shown = text(made)
    assert "\x1b" not in shown
    assert "    +[red]b[/red]" in shown


def test_different_episodes_come_first_and_others_counted() -> None:
    shown = text(report(*(episode(f"t{n:02}", 0, EXACT if n else DIFFERENT) for n in reversed(range(30)))))
    assert shown.index("t00-then") < shown.index("t01-then")
    assert "and 10 more episodes, in replay.json" in shown
    assert "t29-then" not in shown


def test_a_poor_encoding() -> None:
    first = StepComparison(0, Match.DIFFERENT, "message 0 (user)", diff=("-ä…", "+ö"))
    made = report(ReplayedEpisode("täsk", 0, "id", "n", Outcome.COMPLETED, Outcome.COMPLETED, 1.0, 1.0, (first,)))
    assert "    -??" in text(made, "ascii")
