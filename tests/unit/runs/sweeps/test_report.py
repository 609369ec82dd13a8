from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import pytest

from ares_exp.commands.cli.commands import COMMANDS
from ares_exp.errors import ConfigError
from ares_exp.records.results import Outcome
from ares_exp.runs.sweeps.job_folder import FailureNote, JobState
from ares_exp.runs.sweeps.plan import SweepPlan
from ares_exp.runs.sweeps.sweep_report import SweepReport, render_report
from tests.unit.runs.sweeps.recorded_job import record, result

main = partial(COMMANDS["compare"].main, program="ares-exp compare")

JOBS = tuple((f"seed={seed}", "name=x") for seed in range(5))


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Five jobs: complete, cut short, refused, killed before it started, and never started."""
    SweepPlan(5, jobs=JOBS).write(tmp_path)
    record(tmp_path / "0", [result("a", 0, 1.0), result("b", 0, 0.0)])
    cut = [result("a", 0, 1.0), result("b", 0, None, Outcome.CANCELLED)]
    record(tmp_path / "1", cut, ended=False)
    (tmp_path / "2" / ".hydra").mkdir(parents=True)
    FailureNote(tmp_path / "2").write(2, "Expected \x1b[31m something else.")
    (tmp_path / "3" / ".hydra").mkdir(parents=True)
    return tmp_path


def test_every_job_has_a_row(sweep: Path) -> None:
    report = SweepReport.read(sweep)
    assert [row.state for row in report.rows] == [
        JobState.COMPLETE,
        JobState.INCOMPLETE,
        JobState.FAILED,
        JobState.NOT_STARTED,
        JobState.NOT_STARTED,
    ]
    assert [row.overrides for row in report.rows] == [{"seed": str(number)} for number in range(5)]
    assert [(row.finished, row.planned) for row in report.rows[:2]] == [(2, 2), (1, 2)]
    assert report.exit_code == 2


def test_what_was_cut_short_is_no_zero(sweep: Path) -> None:
    row = SweepReport.read(sweep).rows[1]
    assert row.outcomes == {"completed": 1, "cancelled": 1}
    assert row.objective == 1.0
    assert (row.tokens, row.cost) == (20, 1.0), "but it is paid for"


def test_the_best_is_one_of_those_that_are_complete(sweep: Path) -> None:
    best = SweepReport.read(sweep).best
    assert best is not None
    assert (best.job, best.objective) == ("0", 0.5)
    assert best.low is not None
    assert best.high is not None
    assert best.low < 0.5 < best.high


def test_less_may_be_better(tmp_path: Path) -> None:
    SweepPlan(2, "tokens_mean", minimize=True, jobs=JOBS[:2]).write(tmp_path)
    record(tmp_path / "0", [result("a", 0, 1.0)], tasks=["a"])
    record(tmp_path / "1", [result("a", 0, None, Outcome.AGENT_ERROR)], tasks=["a"])
    report = SweepReport.read(tmp_path)
    assert [row.objective for row in report.rows] == [10.0, 10.0]
    assert report.rows[1].state is JobState.INCOMPLETE
    assert report.best is report.rows[0]


def test_jobs_in_folders_of_other_names_are_found(tmp_path: Path) -> None:
    record(tmp_path / "seed=1" / "name=x", [result("a", 0, 1.0)], tasks=["a"], overrides=["seed=1", "resume=true"])
    record(tmp_path / "seed=2" / "name=x", [result("a", 0, 1.0)], tasks=["a"], overrides=["seed=2"])
    report = SweepReport.read(tmp_path)
    assert [(row.job, row.overrides) for row in report.rows] == [
        ("seed=1/name=x", {"seed": "1"}),
        ("seed=2/name=x", {"seed": "2"}),
    ]
    assert report.exit_code == 0


def test_what_people_read(sweep: Path) -> None:
    stream = io.StringIO()
    render_report(SweepReport.read(sweep), stream)
    text = stream.getvalue()
    assert "5 jobs: 1 complete, 1 incomplete, 1 failed, 2 not started" in text
    assert "* best: job 0 (seed=0), mean_reward 0.50 [" in text
    assert "job 2 failed: Expected \\x1b[31m something else." in text
    assert "\x1b" not in text, "what is in a file is not obeyed by a terminal"
    assert f"resume={sweep}" in text


def test_the_command_line(
    sweep: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep)]) == 0
    assert "5 jobs: 1 complete, 1 incomplete, 1 failed, 2 not started" in capsys.readouterr().out
    assert main([str(sweep), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == "0"
    assert main([str(sweep / "0" / ".hydra")]) == 2
    assert "found no job and no plan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plan.json", "["),
        ("plan.json", '{"count": 9999999}'),
        ("plan.json", '{"count": 3, "jobs": [["seed=1"]]}'),
        ("2/failure.json", "[]"),
        ("0/summary.json", "{"),
        ("0/episodes.jsonl", "{}\n"),
    ],
)
def test_broken_records_are_named(sweep: Path, name: str, text: str) -> None:
    (sweep / name).write_text(text)
    with pytest.raises(ConfigError, match=name.rpartition("/")[2]):
        SweepReport.read(sweep)
