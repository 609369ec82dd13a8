import io
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from ares_exp.commands.cli.run_command import run_command
from ares_exp.config.hydra_setup import hydra_records
from ares_exp.errors import ConfigError
from ares_exp.records.results import Outcome, RunSummary
from ares_exp.records.statistics.estimate import mean_over_attempts
from ares_exp.runs.sweeps.jobs import FailureNote, JobFolder, JobState, SweepPlan, job_folders, job_label, varied
from ares_exp.runs.sweeps.sweep_report import SweepReport, render_report
from ares_exp.trackers.metrics import check_objective, known_metrics, objective
from tests.unit.runs.sweeps.recorded_job import record, result

main = partial(run_command, "compare", program="ares-exp compare")

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


def test_cancelled_episode_is_not_a_zero(sweep: Path) -> None:
    row = SweepReport.read(sweep).rows[1]
    assert row.outcomes == {"completed": 1, "cancelled": 1}
    assert row.objective == 1.0
    assert (row.tokens, row.cost) == (20, 1.0), "but it is paid for"


def test_lower_objective_may_be_better(tmp_path: Path) -> None:
    SweepPlan(2, "tokens_mean", minimize=True, jobs=JOBS[:2]).write(tmp_path)
    record(tmp_path / "0", [result("a", 0, 1.0)], tasks=["a"])
    record(tmp_path / "1", [result("a", 0, None, Outcome.AGENT_ERROR)], tasks=["a"])
    report = SweepReport.read(tmp_path)
    assert [row.objective for row in report.rows] == [10.0, 10.0]
    assert report.rows[1].state is JobState.INCOMPLETE
    assert report.best is report.rows[0]


@pytest.fixture
def repeated(tmp_path: Path) -> Path:
    """Two settings with two seeds each: seed 2 of the second setting has not started."""
    jobs = [(f"limits.steps={steps}", "name=x", f"seed={seed}") for steps in (2, 8) for seed in (1, 2)]
    SweepPlan(4, jobs=tuple(jobs)).write(tmp_path)
    for number, rewards in enumerate([(1.0, 0.0), (1.0, 1.0), (None, 0.0)]):
        results = [result(task, 0, reward) for task, reward in zip("ab", rewards, strict=True)]
        record(tmp_path / str(number), results, overrides=jobs[number])
    return tmp_path


def test_sweep_report_averages_settings_over_seeds(repeated: Path) -> None:
    first, second = (settings := SweepReport.read(repeated).settings)
    assert [dict(one.overrides) for one in settings] == [{"limits.steps": "2"}, {"limits.steps": "8"}]
    assert (first.jobs, first.started, first.finished, first.planned) == (("0", "1"), 2, 4, 4)
    expected = mean_over_attempts([[1.0, 1.0], [0.0, 1.0]])
    assert expected is not None
    assert (first.objective, first.low, first.high) == (0.75, expected.low, expected.high)
    assert (first.lowest, first.highest) == (0.5, 1.0)
    assert (second.started, second.objective, second.lowest) == (1, 0.0, 0.0), "an error counts as zero"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 0, "2/2 4/4 0.75"),
        (("--over", "seed"), 0, "2 settings over `seed`"),
        (("--over", "limits.steps"), 0, "2 settings over `limits.steps`"),
        (("--over", "sed"), 2, "Did you mean `seed`? The overridden keys are: limits.steps, name, seed."),
        (("--over", "name"), 2, "differ only in `name`, so there are no jobs to average"),
        (("--over", "seed", "--all-pairs"), 2, "`--over` requires one sweep"),
    ],
)
def test_compare_over_reports_settings(
    repeated: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, text: str
) -> None:
    assert main([str(repeated), *arguments]) == code
    out, err = capsys.readouterr()
    assert text in " ".join((out + err).split())
    assert ("job " in out) == (not arguments), "with --over only the settings"


def test_compare_over_json_has_settings(repeated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(repeated), "--over", "limits.steps", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["over"] == "limits.steps"
    assert [one["jobs"] for one in document["settings"]] == [["0", "2"], ["1", "3"]]


@pytest.mark.parametrize(
    ("rewards", "said", "stars"),
    [
        ((0.0, 0.0, 0.0), "No job is the best: all have mean_reward 0.00", ""),
        ((1.0, 0.0, 1.0), "* best: jobs 0, 2, all with mean_reward 1.00", "0*2*"),
        ((0.0, 0.5, 0.0), "* best: job 1 (policy.base_url=http://host:1), mean_reward 0.50", "1*"),
    ],
)
def test_report_names_equally_good_jobs(
    rewards: Sequence[float], said: str, stars: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = tuple((rf"policy.base_url=http\://host\:{number}", "name=x") for number in range(3))
    SweepPlan(3, jobs=jobs).write(tmp_path)
    for number, reward in enumerate(rewards):
        record(tmp_path / str(number), [result("a", 0, reward)], tasks=["a"])
    monkeypatch.setenv("COLUMNS", "60")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    render_report(SweepReport.read(tmp_path), stream)
    text = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())
    assert said in " ".join(text.split())
    assert "".join(re.findall(r"\d\*", text)) == stars
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 60
    assert job_label(tmp_path, 1, jobs[1]) == "#1 policy.base_url=http://host:1"
    assert job_label(tmp_path / "unplanned", 1, jobs[1]) == "#1 policy.base_url=http://host:1 name=x"


def test_jobs_in_folders_of_other_names_are_found(tmp_path: Path) -> None:
    record(tmp_path / "seed=1" / "name=x", [result("a", 0, 1.0)], tasks=["a"], overrides=["seed=1", "resume=true"])
    record(tmp_path / "seed=2" / "name=x", [result("a", 0, 1.0)], tasks=["a"], overrides=["seed=2"])
    report = SweepReport.read(tmp_path)
    assert [(row.job, row.overrides) for row in report.rows] == [
        ("seed=1/name=x", {"seed": "1"}),
        ("seed=2/name=x", {"seed": "2"}),
    ]
    assert report.exit_code == 0


def test_report_is_readable_text(sweep: Path) -> None:
    stream = io.StringIO()
    render_report(SweepReport.read(sweep), stream)
    text = stream.getvalue()
    assert "5 jobs: 1 complete, 1 incomplete, 1 failed, 2 not started" in text
    assert "* best: job 0 (seed=0), mean_reward 0.50 [" in text
    assert "job 2 failed: Expected \\x1b[31m something else." in text
    assert "\x1b" not in text, "what is in a file is not obeyed by a terminal"
    assert f"resume={sweep}" in text


def test_command_reports_a_sweep(
    sweep: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep)]) == 0
    assert "5 jobs: 1 complete, 1 incomplete, 1 failed, 2 not started" in capsys.readouterr().out
    assert main([str(sweep), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == "0"
    assert main([str(sweep / "0" / ".hydra")]) == 2
    assert "contains no jobs and no plan" in capsys.readouterr().err


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


def test_attempt_without_a_reward_counts_as_zero() -> None:
    summary = RunSummary(2, (result("a", 0, 1.0), result("b", 0, None, Outcome.AGENT_ERROR)))
    assert objective(summary, "mean_reward") == 0.5
    assert objective(summary, "scored_only/mean_reward") == 1.0
    assert objective(RunSummary(2, ()), "mean_reward") is None


def test_unknown_metric_suggests_a_known_metric() -> None:
    assert {"mean_reward", "pass@1", "pass@2", "cost_mean", "scored_only/pass^2"} <= set(known_metrics(3))
    assert "pass@4" not in known_metrics(3)
    check_objective("pass@2", attempts=2)
    with pytest.raises(ConfigError, match=r"no metric `objective=pass@2` with attempts=1.*Did you mean `pass@1`"):
        check_objective("pass@2", attempts=1)


def plan(*jobs: str) -> SweepPlan:
    return SweepPlan(len(jobs), jobs=tuple(tuple(job.split()) for job in jobs))


def test_only_varied_keys_are_named() -> None:
    assert varied([["name=x", "seed=1"], ["name=x", "seed=2", "resume=true"], ["name=x", "seed=1"]]) == ["seed"]
    assert varied([["a=1"], ["b=1"]]) == ["a", "b"], "what one has and another has not"
    assert varied([["a=1"]]) == []


@pytest.mark.parametrize(
    "now",
    [
        plan("seed=1 limits.steps=8", "seed=2 limits.steps=8"),
        plan("concurrency=8 seed=1 limits.steps=9 resume=true", "concurrency=8 seed=2 limits.steps=9 resume=true"),
    ],
)
def test_same_jobs_may_continue(now: SweepPlan) -> None:
    now.check_continues(plan("seed=1 limits.steps=8", "seed=2 limits.steps=8"))
    now.check_continues(SweepPlan())


@pytest.mark.parametrize(
    ("now", "number"),
    [
        (plan("seed=1", "seed=3"), 1),
        (plan("seed=2", "seed=1"), 0),
        (plan("seed=1"), 1),
        (plan("seed=1", "seed=2", "seed=3"), 2),
        (plan("seed=1 limits.steps=8", "seed=1 limits.steps=9", "seed=2 limits.steps=8", "seed=2 limits.steps=9"), 0),
    ],
)
def test_changed_jobs_cannot_continue(now: SweepPlan, number: int) -> None:
    with pytest.raises(ConfigError, match=rf"its job {number} is "):
        now.check_continues(plan("seed=1", "seed=2"))


DONE = [result("a", 0, 1.0), result("b", 0, 0.0)]


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    recorded: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    return {**recorded, "resume": True, "resume_redo": [], **changes}


def test_harmless_changes_keep_a_job_done(tmp_path: Path) -> None:
    job = JobFolder.read(record(tmp_path / "0", DONE, resume=False))
    assert job.state is JobState.COMPLETE
    assert job.is_done(config(tmp_path / "0", concurrency=9))


@pytest.mark.parametrize("changes", [{"attempts": 2}, {"seed": 1}, {"resume_redo": ["agent_error"]}])
def test_job_with_changed_options_is_not_done(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert not JobFolder.read(record(tmp_path / "0", DONE, seed=0)).is_done(config(tmp_path / "0", **changes))


@pytest.mark.parametrize("results", [[], DONE[:1], [DONE[0], result("b", 0, None, Outcome.CANCELLED)]])
@pytest.mark.parametrize("ended", [True, False])
def test_job_with_owed_episodes_is_not_done(tmp_path: Path, results: list[Any], ended: bool) -> None:
    job = JobFolder.read(record(tmp_path / "0", results, ended=ended))
    assert job.state is JobState.INCOMPLETE
    assert not job.is_done(config(tmp_path / "0"))


def test_failed_solutions_fail_a_complete_job(tmp_path: Path) -> None:
    ran = [JobFolder.read(record(tmp_path / str(one), DONE, must_pass=one)) for one in (False, True)]
    assert [job.state for job in ran] == [JobState.COMPLETE] * 2
    assert [job.exit_code for job in ran] == [0, 1]


def test_jobs_are_sorted_by_number(tmp_path: Path) -> None:
    for name in ("10", "9", "0", ".submitit"):
        record(tmp_path / name, [])
    (tmp_path / "empty").mkdir()
    assert [path.name for path in job_folders(tmp_path)] == ["0", "9", "10"]


def test_hydras_records_are_written_once(tmp_path: Path) -> None:
    assert hydra_records(True, str(tmp_path / "new")) == ".hydra"
    record(tmp_path / "0", [])
    assert hydra_records(True, str(tmp_path / "0")) is None
    assert hydra_records(False, str(tmp_path / "0")) == ".hydra"
    assert hydra_records(True, None) == ".hydra"
