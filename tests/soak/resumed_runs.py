"""Cases of killed runs that take long: `pytest tests/soak/resumed_runs.py`."""

import shutil
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import whole
from tests.e2e.counting_endpoint import APPEND, CountingEndpoint
from tests.e2e.killed_run import CONCURRENCY, Moment, make_run
from tests.e2e.test_kill_and_resume import check_time_is_up_again, endpoint

__all__ = ["endpoint", "whole"]  # fixtures

pytestmark = [pytest.mark.local, pytest.mark.timeout(600)]


def test_snapshot_of_the_earlier_try_is_restored(tmp_path: Path, endpoint: CountingEndpoint) -> None:
    endpoint.turns = (12, 12)
    run = make_run(tmp_path, endpoint, "snapshot=every_step")
    assert run.start(Moment(requests=CONCURRENCY * 3)) == -signal.SIGKILL, run.said
    assert run.resume() == 0, run.said
    replayed = [row["replayed"] for row in run.all_rows if row["replayed"] is not None]
    assert any(one["from_snapshot"] for one in replayed), replayed
    assert {row["num_steps"] for row in run.final.values()} == {12, 24}, "one task has two steps"


def test_timed_out_stage_ends_again_with_snapshots(tmp_path: Path) -> None:
    check_time_is_up_again(tmp_path, first_takes_sec=60, command=APPEND, snapshot="every_step")


def test_killed_branch_resumes(tmp_path: Path, endpoint: CountingEndpoint) -> None:
    run = make_run(tmp_path, endpoint, "env.tasks=[task-0]", "attempts=1")
    assert run.start() == 0, run.said
    [row] = run.all_rows
    shutil.move(run.path, tmp_path / "recorded")
    branch = f"branch_from=recorded/{row['episode_id']}@1"
    command = [branch, "branches=4", "concurrency=2", "hydra.run.dir=run"]
    asked = endpoint.asked.total()
    assert run.execute(Moment(requests=3), *command) == -signal.SIGKILL
    assert run.resume() == 0, run.said
    assert [row["outcome"] for row in run.final.values()] == ["completed"] * 4
    assert len({row["reward"] for row in run.final.values()}) == 4, "each has a seed of its own"
    lost = endpoint.asked.total() - asked - sum(row["num_steps"] for row in run.final.values())
    assert 0 <= lost <= 2
    assert any(row["replayed"] is not None for row in run.final.values())
