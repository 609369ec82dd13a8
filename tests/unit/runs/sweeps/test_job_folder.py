from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ares_exp.config.hydra_setup import hydra_records
from ares_exp.records.results import Outcome
from ares_exp.runs.sweeps.job_folder import JobFolder, JobState, job_folders
from tests.unit.runs.sweeps.recorded_job import record, result

DONE = [result("a", 0, 1.0), result("b", 0, 0.0)]


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    recorded: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    return {**recorded, "resume": True, "resume_redo": [], **changes}


def test_a_complete_job_is_done_whatever_changes_no_result(tmp_path: Path) -> None:
    job = JobFolder.read(record(tmp_path / "0", DONE, resume=False))
    assert job.state is JobState.COMPLETE
    assert job.is_done(config(tmp_path / "0", concurrency=9))


@pytest.mark.parametrize("changes", [{"attempts": 2}, {"seed": 1}, {"resume_redo": ["agent_error"]}])
def test_it_is_not_done_where_more_or_something_else_is_asked_for(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert not JobFolder.read(record(tmp_path / "0", DONE, seed=0)).is_done(config(tmp_path / "0", **changes))


@pytest.mark.parametrize("results", [[], DONE[:1], [DONE[0], result("b", 0, None, Outcome.CANCELLED)]])
@pytest.mark.parametrize("ended", [True, False])
def test_it_is_not_done_while_something_is_owed(tmp_path: Path, results: list[Any], ended: bool) -> None:
    job = JobFolder.read(record(tmp_path / "0", results, ended=ended))
    assert job.state is JobState.INCOMPLETE
    assert not job.is_done(config(tmp_path / "0"))


def test_solutions_that_fail_make_a_complete_job_fail_the_sweep(tmp_path: Path) -> None:
    played = [JobFolder.read(record(tmp_path / str(one), DONE, must_pass=one)) for one in (False, True)]
    assert [job.state for job in played] == [JobState.COMPLETE] * 2
    assert [job.exit_code for job in played] == [0, 1]


def test_jobs_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
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
