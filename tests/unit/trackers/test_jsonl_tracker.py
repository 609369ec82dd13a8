"""The JSON lines that a run leaves."""

import json
import math
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ares_exp.records.results import RunSummary
from ares_exp.trackers.jsonl_tracker import JsonlTracker
from tests.unit.trackers.tracked_run import RESULTS, SECRET, episode, run_info


def lines(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    text = (run_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def execute(tracker: JsonlTracker, run_dir: Path) -> None:
    tracker.start(run_info(run_dir))
    for result in RESULTS:
        tracker.log_episode(result)
    tracker.log_system({"system/loop_lag_sec": 0.5})
    tracker.log_order({"id": "1", "verb": "pause"})
    tracker.finish(RunSummary(3, RESULTS, wall_sec=4.0))


def test_each_event_is_a_line(tmp_path: Path) -> None:
    ticks = count(100)
    tracker = JsonlTracker(clock=lambda: float(next(ticks)))
    execute(tracker, tmp_path)
    start, *episodes, system, order, finish = lines(tmp_path)
    assert tracker.failures == 0

    assert (start["kind"], start["run_id"], start["resumed"]) == ("start", "run-1", False)
    assert (start["config"]["seed"], start["config"]["policy"]["api_key"]) == (3, "***")
    assert start["provenance"] == {"argv": ["ares_exp", "seed=3"], "choices": {"env": "harbor"}}
    assert [line["kind"] for line in episodes] == ["episode"] * 3
    assert [line["episode_id"] for line in episodes] == ["e1", "e2", "e3"]
    assert [line["outcome"] for line in episodes] == ["completed", "agent_error", "completed"]
    assert [line["progress/finished"] for line in episodes] == [1, 2, 3]
    assert [line.get("episode/reward") for line in episodes] == [1.0, None, 0.5]
    assert episodes[-1]["progress/mean_reward"] == 0.75
    assert (system["kind"], system["system/loop_lag_sec"]) == ("system", 0.5)
    assert (order["kind"], order["id"], order["verb"]) == ("order", "1", "pause")
    assert (finish["kind"], finish["run/mean_reward"], finish["run/wall_sec"]) == ("finish", 0.75, 4.0)
    assert finish["stat/mean_reward"] == 0.5  # an error counts as zero
    assert finish["stat/scored_only/mean_reward"] == 0.75
    assert [line["time"] for line in lines(tmp_path)] == [100, 101, 102, 103, 104, 105, 106]


def test_resumed_run_appends_with_running_totals(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(run_info(tmp_path))
    tracker.log_episode(RESULTS[0])
    tracker.log_episode(RESULTS[1])
    tracker.finish(RunSummary(3, RESULTS[:2]))
    before = lines(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "epis')  # a torn line

    tracker = JsonlTracker()
    tracker.start(run_info(tmp_path, resumed=True, earlier=RESULTS[:2]))
    tracker.log_episode(RESULTS[2])
    tracker.finish(RunSummary(3, RESULTS))
    start, last, finish = lines(tmp_path)[len(before) :]
    assert lines(tmp_path)[: len(before)] == before
    assert (start["kind"], start["resumed"]) == ("start", True)
    assert (last["progress/finished"], last["progress/mean_reward"]) == (3, 0.75)
    assert finish["run/finished"] == 3


def test_non_finite_number_is_null(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(run_info(tmp_path))
    tracker.log_episode(episode(1, math.nan))
    tracker.log_system({"system/a": math.inf, "system/b": 1.0})
    tracker.finish(RunSummary(1, ()))
    _, row, system, _ = lines(tmp_path)
    assert row["episode/reward"] is None
    assert (system["system/a"], system["system/b"]) == (None, 1.0)


def test_secrets_do_not_reach_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-the-environment")
    tracker = JsonlTracker()
    tracker.start(run_info(tmp_path, name="named a-key-of-the-environment"))
    tracker.finish(RunSummary(0, ()))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert SECRET not in text
    assert "a-key-of-the-environment" not in text
