"""Which run `latest` is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import run_path


def start(place: str, *started: object) -> Path:
    """Writes a run directory whose sessions were started at these times."""
    path = Path(place)
    path.mkdir(parents=True)
    (path / "episodes.jsonl").touch()
    if started:
        lines = [json.dumps({"started": time, "pid": 7}) for time in started]
        (path / "sessions.jsonl").write_text("\n".join([*lines, '{"ended": 9e9}', ""]))
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_the_run_that_was_started_last_whatever_was_touched_or_resumed_since(
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, resumed = start("outputs/z/2026-01-01", 100.0), start("outputs/mine", 200.0, 900.0)
    newest = start("outputs/a/2026-01-02_2", 300.0)
    for path in (old, resumed):
        os.utime(path, (2e9, 2e9))
        os.utime(path / "sessions.jsonl", (2e9, 2e9))
    assert run_path("latest") == newest
    assert run_path("latest/fix@3") == newest / "fix@3"
    assert capsys.readouterr().err == f"`latest` is {newest}\n" * 2


def test_a_sweep_is_one_started_with_its_first_job() -> None:
    for job, started in (("0", 100.0), ("1", 900.0)):
        start(f"outputs/grid/{job}", started)
    Path("outputs/grid/multirun.yaml").touch()
    run = start("outputs/run", 200.0)
    assert run_path("latest") == run
    start("outputs/newer/lr=1/0", 300.0)
    Path("outputs/newer/multirun.yaml").touch()
    assert run_path("latest") == Path("outputs/newer")


def test_the_runs_of_a_check_do_not_count() -> None:
    run = start("outputs/run", 100.0)
    start("outputs/task-check/2026-01-01/nothing", 200.0)
    assert run_path("latest") == run
    mine = start("outputs/mine/task-check", 300.0)
    assert run_path("latest") == mine


def test_what_does_not_say_when_it_was_started_does_not_count() -> None:
    start("outputs/merged")
    start("outputs/merged/parts/0", 900.0)
    for number, started in enumerate((None, "soon", float("inf"), [1], {}, 10**400)):
        start(f"outputs/broken/{number}", started)
    (start("outputs/no-object") / "sessions.jsonl").write_text("[]\n")
    (start("outputs/no-json") / "sessions.jsonl").write_text("[" * 100_000)
    os.mkfifo(start("outputs/pipe") / "sessions.jsonl")
    with pytest.raises(ConfigError, match=r"under outputs/ in .*; found none"):
        run_path("latest")
    assert run_path("outputs/merged") == Path("outputs/merged")
    assert run_path("latest_run") == Path("latest_run")


def test_a_directory_of_that_name_goes_first(capsys: pytest.CaptureFixture[str]) -> None:
    start("outputs/run", 100.0)
    start("latest")
    assert run_path("latest/e1") == Path("latest/e1")
    assert run_path("/elsewhere/latest") == Path("/elsewhere/latest")
    assert capsys.readouterr().err == ""


def test_without_outputs_there_is_none(here: Path) -> None:
    with pytest.raises(ConfigError, match=f"in {here}, as `latest` is the most recent run under outputs/"):
        run_path("latest")
