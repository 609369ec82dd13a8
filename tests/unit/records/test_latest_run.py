"""Which run `latest` is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.records.latest_run import run_path


def begin(place: str, *began: object) -> Path:
    """Writes a run directory whose sessions were begun at these times."""
    path = Path(place)
    path.mkdir(parents=True)
    (path / "episodes.jsonl").touch()
    if began:
        lines = [json.dumps({"began": time, "pid": 7}) for time in began]
        (path / "sessions.jsonl").write_text("\n".join([*lines, '{"ended": 9e9}', ""]))
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_the_run_that_was_begun_last_whatever_was_touched_or_resumed_since(
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, resumed = begin("outputs/z/2026-01-01", 100.0), begin("outputs/mine", 200.0, 900.0)
    newest = begin("outputs/a/2026-01-02_2", 300.0)
    for path in (old, resumed):
        os.utime(path, (2e9, 2e9))
        os.utime(path / "sessions.jsonl", (2e9, 2e9))
    assert run_path("latest") == newest
    assert run_path("latest/fix@3") == newest / "fix@3"
    assert capsys.readouterr().err == f"`latest` is {newest}\n" * 2


def test_a_sweep_is_one_begun_with_its_first_job() -> None:
    for job, began in (("0", 100.0), ("1", 900.0)):
        begin(f"outputs/grid/{job}", began)
    Path("outputs/grid/multirun.yaml").touch()
    run = begin("outputs/run", 200.0)
    assert run_path("latest") == run
    begin("outputs/newer/lr=1/0", 300.0)
    Path("outputs/newer/multirun.yaml").touch()
    assert run_path("latest") == Path("outputs/newer")


def test_the_runs_of_a_check_do_not_count() -> None:
    run = begin("outputs/run", 100.0)
    begin("outputs/task-check/2026-01-01/nothing", 200.0)
    assert run_path("latest") == run
    mine = begin("outputs/mine/task-check", 300.0)
    assert run_path("latest") == mine


def test_what_does_not_say_when_it_was_begun_does_not_count() -> None:
    begin("outputs/merged")
    begin("outputs/merged/parts/0", 900.0)
    for number, began in enumerate((None, "soon", float("inf"), [1], {}, 10**400)):
        begin(f"outputs/broken/{number}", began)
    (begin("outputs/no-object") / "sessions.jsonl").write_text("[]\n")
    (begin("outputs/no-json") / "sessions.jsonl").write_text("[" * 100_000)
    os.mkfifo(begin("outputs/pipe") / "sessions.jsonl")
    with pytest.raises(ConfigError, match=r"under outputs/ in .*; found none"):
        run_path("latest")
    assert run_path("outputs/merged") == Path("outputs/merged")
    assert run_path("latest_run") == Path("latest_run")


def test_a_directory_of_that_name_goes_first(capsys: pytest.CaptureFixture[str]) -> None:
    begin("outputs/run", 100.0)
    begin("latest")
    assert run_path("latest/e1") == Path("latest/e1")
    assert run_path("/elsewhere/latest") == Path("/elsewhere/latest")
    assert capsys.readouterr().err == ""


def test_without_outputs_there_is_none(here: Path) -> None:
    with pytest.raises(ConfigError, match=f"in {here}, as `latest` is the one under outputs/ that was begun last"):
        run_path("latest")
