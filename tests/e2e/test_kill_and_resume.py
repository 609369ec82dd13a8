"""Runs that are killed or interrupted at any moment, and resumed: they come to what they would have come to."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import (
    CONCURRENCY,
    KilledRun,
    Moment,
    check,
    kill_and_resume,
    make_tasks,
    moments,
    records,
)

pytestmark = [pytest.mark.once, pytest.mark.local, pytest.mark.timeout(600)]

KILLS = int(os.environ.get("ARES_EXP_KILLS", "6"))
"""At so many moments runs are killed; half as many on Docker."""
AT_ONCE = 3


def make(directory: Path, endpoint: CountingEndpoint, backend: str = "local", *overrides: str) -> KilledRun:
    directory.mkdir(parents=True, exist_ok=True)
    make_tasks(directory)
    return KilledRun(directory, endpoint, backend, overrides)


@pytest.fixture
def endpoint() -> Iterator[CountingEndpoint]:
    with CountingEndpoint() as server:
        yield server


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KilledRun]:
    """A run that nobody interrupts."""
    with CountingEndpoint() as server:
        run = make(tmp_path_factory.mktemp("whole"), server)
        assert run.begin() == 0, run.said
        yield run


@pytest.fixture
def killed(tmp_path: Path, endpoint: CountingEndpoint) -> KilledRun:
    """A run that was killed in the middle."""
    run = make(tmp_path, endpoint)
    assert run.begin(Moment(requests=12)) == -signal.SIGKILL
    return run


def kill_at_many(tmp_path: Path, whole: KilledRun, backend: str, count: int) -> None:
    def one(number: int, moment: Moment) -> None:
        with CountingEndpoint() as server:
            kill_and_resume(make(tmp_path / str(number), server, backend), whole, moment, random.Random(number))

    chosen = moments(count, whole.endpoint.asked.total(), random.Random(1))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(one, range(count), chosen))


def test_killed_at_any_moment(tmp_path: Path, whole: KilledRun) -> None:
    kill_at_many(tmp_path, whole, "local", KILLS)


@pytest.mark.docker
def test_killed_at_any_moment_on_docker(tmp_path: Path, whole: KilledRun) -> None:
    kill_at_many(tmp_path, whole, "docker", KILLS // 2)


def test_snapshots_and_other_collectors(tmp_path: Path, whole: KilledRun) -> None:
    def one(number: int, overrides: list[str]) -> KilledRun:
        with CountingEndpoint() as server:
            run = make(tmp_path / str(number), server, "local", *overrides)
            kill_and_resume(run, whole, Moment(requests=13), random.Random(number))
        return run

    chosen = [["snapshot=every_step"], ["collector=none"], ["collector=[json,parquet]"], ["collector=jsonl"]]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        snapshots, *_ = threads.map(one, range(len(chosen)), chosen)
    restored = [row["replayed"]["from_snapshot"] for row in snapshots.all_rows if row["replayed"] is not None]
    assert any(restored), restored


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(tmp_path: Path, endpoint: CountingEndpoint, whole: KilledRun, number: signal.Signals) -> None:
    run = make(tmp_path, endpoint)
    assert run.begin(Moment(requests=12, number=number)) == 130, run.said
    cancelled = [row for row in run.all_rows if row["outcome"] == "cancelled"]
    assert 0 < len(cancelled) <= CONCURRENCY
    run.kills += 1  # as many calls may be lost
    assert run.resume() == 0, run.said
    check(run, whole)
    assert "Traceback" not in run.said


def test_a_budget_is_used_up_and_made_larger(tmp_path: Path, endpoint: CountingEndpoint, whole: KilledRun) -> None:
    run = make(tmp_path, endpoint, "local", "+budget.tokens=1500")
    assert run.begin() != 0
    assert "budget" in run.said
    asked = endpoint.asked.total()
    assert asked < whole.endpoint.asked.total()
    assert run.resume() != 0, "it is still used up"
    run.kills += 2
    assert run.resume(Moment(), "budget.tokens=100000") == 0, run.said
    check(run, whole)


def test_an_endpoint_that_was_down_comes_back(tmp_path: Path, endpoint: CountingEndpoint, whole: KilledRun) -> None:
    run = make(tmp_path, endpoint)
    endpoint.down_at = 2
    assert run.begin() == 1, run.said
    assert {row["outcome"] for row in run.all_rows} == {"policy_error"}
    failed = endpoint.asked.total()
    assert run.resume() == 1, "errors are kept"
    assert endpoint.asked.total() == failed
    endpoint.down_at = None
    run.kills = 1  # of each episode one call had no answer
    assert run.resume(Moment(), "resume_redo=[policy_error]") == 0, run.said
    assert {turn.number for turn, times in endpoint.asked.items() if times > 1} == {2}
    assert [row["replayed"]["steps"] for row in run.final.values()] == [2] * len(run.final)
    assert {slot: row["reward"] for slot, row in run.final.items()} == {
        slot: row["reward"] for slot, row in whole.final.items()
    }
    assert not (run.path / "answers").exists()


RANDOM = "echo $RANDOM$RANDOM$RANDOM > /work/state; cat /work/state"


@pytest.mark.parametrize("diverged", ["continue", "restart"])
def test_an_environment_that_is_another_one(tmp_path: Path, diverged: str) -> None:
    with CountingEndpoint(turns=(4, 4), command=RANDOM) as server:
        run = make(tmp_path, server)
        assert run.begin(Moment(requests=CONCURRENCY * 2 + 1)) == -signal.SIGKILL
        assert run.resume(Moment(), f"resume_diverged={diverged}") == 0, run.said
    replayed = [row for row in run.all_rows if row["replayed"] is not None]
    assert {row["replayed"]["diverged_at"] for row in replayed if row["replayed"]["steps"]} == {1}
    outcomes = {row["outcome"] for row in replayed}
    assert outcomes == ({"completed"} if diverged == "continue" else {"abandoned"})
    assert {row["outcome"] for row in run.final.values()} == {"completed"}
    assert not (run.path / "answers").exists()


def test_what_may_be_set_otherwise(killed: KilledRun, whole: KilledRun, tmp_path: Path) -> None:
    kept, log = records(killed.path), killed.path / "episodes.jsonl"
    assert killed.resume(Moment(), "policy.temperature=1") == 2
    assert "`policy.temperature`" in killed.said
    test = tmp_path / "tasks" / "task-1" / "tests" / "test.sh"
    text = test.read_text()
    test.write_text(f"{text}\n# changed\n")
    assert killed.resume() == 2
    assert "task-1" in killed.said
    test.write_text(text)
    (tmp_path / "elsewhere").mkdir()
    again = subprocess.run(
        [sys.executable, "-m", "ares_exp", "resume=../run", "concurrency=1"],
        cwd=tmp_path / "elsewhere",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    check(killed, whole)
    assert records(killed.path) == kept
    rows = log.read_bytes()
    for _ in range(2):
        assert killed.resume() == 0, killed.said
    assert log.read_bytes() == rows
    check(killed, whole)


def test_forced(killed: KilledRun) -> None:
    assert killed.resume(Moment(), "policy.temperature=1", "resume_force=true") == 0, killed.said
    assert "`policy.temperature` was None and is 1" in killed.said


def test_half_written_files(killed: KilledRun, whole: KilledRun) -> None:
    with (killed.path / "episodes.jsonl").open("a") as rows:
        rows.write('{"episode_id": "task-0__0')
    logs = sorted((killed.path / "answers").glob("*.jsonl"))
    lines = logs[0].read_text().splitlines(keepends=True)
    logs[0].write_text("".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    for partial in (killed.path / "trajectories").glob("*.partial"):
        partial.write_bytes(partial.read_bytes()[:-7])
    (killed.path / "trajectories" / "empty.json.partial").touch()
    (killed.path / "sessions.jsonl").write_text('{"began": 1')
    with (killed.path / "trajectories" / "empty.json.partial").open():
        pass
    killed.kills += 1  # the torn answer is lost, too
    killed.rows = []
    assert killed.resume() == 0, killed.said
    assert json.loads(lines[0])["episode_id"] in {row["episode_id"] for row in killed.all_rows}
    assert {slot: row["reward"] for slot, row in killed.final.items()} == {
        slot: row["reward"] for slot, row in whole.final.items()
    }
    killed.trajectories()


def test_a_run_is_played_by_one_process(tmp_path: Path, endpoint: CountingEndpoint, whole: KilledRun) -> None:
    run, said = make(tmp_path, endpoint), []

    def resume_meanwhile() -> None:
        assert endpoint.when(6).wait(60)
        done = subprocess.run(
            [sys.executable, "-m", "ares_exp", "resume=run"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        said.append((done.returncode, done.stderr))

    endpoint.turns = (20, 20)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(resume_meanwhile)
        assert run.begin() == 0, run.said
        other.result()
    [(code, stderr)] = said
    assert code == 2, stderr
    assert "another process plays it" in stderr
    assert len(run.all_rows) == len(run.final)


def test_a_branch_run(tmp_path: Path, endpoint: CountingEndpoint) -> None:
    run = make(tmp_path, endpoint, "local", "env.tasks=[test/task-0]", "attempts=1")
    if run.begin() != 0:
        pytest.fail(run.said)
    [row] = run.all_rows
    shutil.move(run.path, tmp_path / "recorded")
    branch = f"branch_from=recorded/{row['episode_id']}@1"
    command = [branch, "branches=4", "concurrency=2", "hydra.run.dir=run"]
    asked = endpoint.asked.total()
    assert run.play(Moment(requests=3), *command) == -signal.SIGKILL
    assert run.resume() == 0, run.said
    assert [row["outcome"] for row in run.final.values()] == ["completed"] * 4
    assert len({row["reward"] for row in run.final.values()}) == 4, "each has a seed of its own"
    lost = endpoint.asked.total() - asked - sum(row["num_steps"] for row in run.final.values())
    assert 0 <= lost <= 2
    assert any(row["replayed"] is not None for row in run.final.values())
