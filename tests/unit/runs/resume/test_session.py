"""Which runs can be resumed: only with the same config. Also the files that a session writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import ConfigError
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.records.run_dir import RunDir, dump_json
from ares_exp.records.run_summary import RunSummary
from ares_exp.runs.resume.session import Session, close_session, open_session
from ares_exp.tasks.task_files import with_files

URL = "http://127.0.0.1:8000/v1"
CONFIG: dict[str, Any] = {
    "name": "x",
    "seed": 1,
    "concurrency": 4,
    "attempts": 2,
    "resume_force": False,
    "env": {"_target_": "e", "path": "tasks", "limit": None},
    "agent": {"_target_": "a", "max_output_chars": 100},
    "policy": {"_target_": "p", "temperature": 0.5, "timeout_sec": 600.0, "prices": {"m": 1}, "base_url": URL},
    "collector": {"_target_": "c"},
}
TASKS = {"fix": "d1", "sum": "d2"}
PROVENANCE = {"hostname": "here", "ares_exp_version": "1"}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "episodes.jsonl").touch()
    return RunDir(tmp_path / "run")


def opened(run_dir: RunDir, tasks: Mapping[str, str | None] = TASKS, **changed: Any) -> Session:
    config = {**CONFIG, **changed}
    return open_session(run_dir, config, PROVENANCE, tasks, ["beware"])


def sessions(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.sessions.read_text().splitlines()]


def test_a_run_starts_and_is_resumed(run_dir: RunDir) -> None:
    started = opened(run_dir)
    files = {path: path.read_bytes() for path in (run_dir.config, run_dir.provenance)}
    assert started.earlier is None
    assert json.loads(files[run_dir.provenance])["warnings"] == ["beware"]
    resumed = opened(run_dir)
    assert resumed.run_id == started.run_id
    assert resumed.earlier is not None
    assert resumed.earlier.results == ()
    assert {path: path.read_bytes() for path in files} == files
    assert [line["resumed"] for line in sessions(run_dir)] == [False, True]


def test_a_run_killed_before_its_config_starts_again(run_dir: RunDir) -> None:
    opened(run_dir)
    run_dir.config.unlink()
    assert not run_dir.has_run
    assert opened(run_dir).earlier is None


@pytest.mark.parametrize(
    "changed",
    [
        {"concurrency": 1, "attempts": 9, "name": "y", "collector": None},
        {"policy": {**CONFIG["policy"], "timeout_sec": 1.0}},
        {"policy": {**CONFIG["policy"], "base_url": "http://127.0.0.1:8001/v1/"}},
        {"snapshot": {"_target_": "s"}, "retry": {"container_error": 2}, "budget": {"cost": 5}},
    ],
)
def test_harmless_options_may_change(run_dir: RunDir, changed: dict[str, Any]) -> None:
    opened(run_dir)
    assert opened(run_dir, **changed).earlier is not None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"policy": {**CONFIG["policy"], "temperature": 1}}, "`policy.temperature` was 0.5 and is 1"),
        ({"policy": {**CONFIG["policy"], "top_p": 1}}, "`policy.top_p` was 'nothing' and is 1"),
        ({"policy": {**CONFIG["policy"], "base_url": "http://other:8000/v1"}}, f"`policy.base_url` was '{URL}'"),
        ({"policy": {**CONFIG["policy"], "base_url": "http://[x/v1"}}, f"`policy.base_url` was '{URL}'"),
        ({"policy": {"_target_": "q"}}, "`policy._target_` was 'p' and is 'q'"),
        ({"policy": {**CONFIG["policy"], "prices": {"m": 2}}}, "`policy.prices.m` was 1 and is 2"),
        ({"agent": None}, "`agent` was 'nothing' and is None"),
        ({"seed": 2}, "`seed` was 1 and is 2"),
        ({"env": {**CONFIG["env"], "path": "others"}}, "`env.path` was 'tasks' and is 'others'"),
    ],
)
def test_another_experiment_is_refused(run_dir: RunDir, changed: dict[str, Any], expected: str) -> None:
    opened(run_dir)
    with pytest.raises(ConfigError) as caught:
        opened(run_dir, **changed)
    assert expected in str(caught.value)
    assert "resume_force=true" in str(caught.value)
    assert len(sessions(run_dir)) == 1
    assert opened(run_dir, resume_force=True, **changed).earlier is not None


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({"fix": "d1"}, "1 task is no longer selected (sum)"),
        ({**TASKS, "new": "d3", "more": "d4"}, "2 tasks are new (new, more)"),
        ({"fix": "other", "sum": "d2"}, "the files of 1 task have changed (fix)"),
    ],
)
def test_another_task_set_is_refused(run_dir: RunDir, tasks: dict[str, str], expected: str) -> None:
    opened(run_dir)
    with pytest.raises(ConfigError) as caught:
        opened(run_dir, tasks)
    assert expected in str(caught.value)


def test_a_changed_hint_file_is_rejected_by_name(run_dir: RunDir) -> None:
    opened(run_dir, {name: with_files(digest, {"/a/hint.md": "old"}) for name, digest in TASKS.items()})
    assert opened(run_dir, TASKS).earlier is not None
    with pytest.raises(ConfigError, match=r"it has changed: other files that agents read have changed \(/a/hint.md\)"):
        opened(run_dir, {name: with_files(digest, {"/a/hint.md": "new"}) for name, digest in TASKS.items()})


def test_a_long_list_of_differences_is_cut(run_dir: RunDir) -> None:
    opened(run_dir)
    with pytest.raises(ConfigError, match="; and 5 more"):
        opened(run_dir, policy={f"k{number}": number for number in range(5)}, seed=3)


def test_paths_are_the_same_from_wherever(run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened(run_dir)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert opened(run_dir, env={**CONFIG["env"], "path": "../tasks"}).earlier is not None
    with pytest.raises(ConfigError, match=r"`env\.path` was"):
        opened(run_dir)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
@pytest.mark.parametrize("name", ["config.yaml", "provenance.json"])
def test_broken_records_are_named(run_dir: RunDir, name: str, text: str) -> None:
    opened(run_dir)
    (run_dir.path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        opened(run_dir)


def test_seconds_of_all_sessions_are_added_up(run_dir: RunDir) -> None:
    opened(run_dir)
    lines = [
        '{"started": 100.0}',
        '{"ended": 110.0}',
        '{"started": 200.0}',
        '{"beg{"started": 300.0}',
        '{"started": 400.0}',
    ]
    run_dir.sessions.write_text("\n".join([*lines, '{"ended": 401.0}']) + "\n")
    killed = EpisodeResult("a", "fix", 0, 1, Outcome.COMPLETED, 1.0, started_at=201.0, finished_at=205.0)
    run_dir.append_episodes(dump_json(killed.to_dict()))
    earlier = opened(run_dir).earlier
    assert earlier is not None
    assert earlier.wall_sec == 16.0


@pytest.mark.parametrize("text", ["", '{"started"', '{"ended": 5.0}\n', "[]\n5\n"])
def test_a_run_without_a_whole_session(run_dir: RunDir, text: str) -> None:
    opened(run_dir)
    run_dir.sessions.write_text(text)
    earlier = opened(run_dir).earlier
    assert earlier is not None
    assert earlier.wall_sec == 0.0


def test_a_session_ends(run_dir: RunDir) -> None:
    opened(run_dir)
    run_dir.responses.mkdir()
    close_session(run_dir, RunSummary(planned=1, results=(), interrupted=True))
    assert sessions(run_dir)[-1]["interrupted"] is True
    assert not run_dir.responses.exists()


def test_useful_responses_stay(run_dir: RunDir) -> None:
    opened(run_dir)
    run_dir.responses.mkdir()
    (run_dir.responses / "a.jsonl").touch()
    close_session(run_dir, RunSummary(planned=1, results=()))
    assert (run_dir.responses / "a.jsonl").exists()
