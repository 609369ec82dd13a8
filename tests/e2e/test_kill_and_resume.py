"""Runs that are killed or interrupted at any moment, and resumed: they come to what they would have come to."""

import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import pytest

from ares_exp.records.run_dir import RunDir
from tests.e2e.counting_endpoint import APPEND, CountingEndpoint
from tests.e2e.killed_run import (
    TEST,
    TWO_STEPS,
    KilledRun,
    Moment,
    check,
    kill_and_resume,
    make_run,
    make_tasks,
    moments,
    records,
)

pytestmark = [pytest.mark.once, pytest.mark.local, pytest.mark.timeout(600)]

KILLS, DOCKER_KILLS = 2, 1
"""At so many moments runs are killed. `tests/soak/kills.py` does it 200 times."""
AT_ONCE = 3
VARIANTS = ([], ["snapshot=every_step"], ["collector=none"], ["collector=[json,jsonl]"], ["collector=jsonl"])


@pytest.fixture
def endpoint() -> Iterator[CountingEndpoint]:
    with CountingEndpoint() as server:
        yield server


@pytest.fixture
def killed(tmp_path: Path, endpoint: CountingEndpoint) -> KilledRun:
    run = make_run(tmp_path, endpoint)
    assert run.start(Moment(requests=12)) == -signal.SIGKILL, run.said
    return run


def kill_at_many_moments(tmp_path: Path, whole: KilledRun, backend: str, count: int) -> None:
    def one(number: int, moment: Moment, overrides: list[str]) -> None:
        with CountingEndpoint() as server:
            run = make_run(tmp_path / str(number), server, *overrides, backend=backend)
            kill_and_resume(run, whole, moment, random.Random(number))

    chosen = moments(count, whole.endpoint.asked.total(), random.Random(1))
    if backend == "local":
        chosen[count // 2] = chosen[count // 2]._replace(number=signal.SIGTERM)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(one, range(count), chosen, cycle(VARIANTS)))


def test_run_killed_at_any_moment_resumes(tmp_path: Path, whole: KilledRun) -> None:
    kill_at_many_moments(tmp_path, whole, "local", KILLS)


@pytest.mark.docker
@pytest.mark.nightly
def test_run_killed_on_docker_resumes(tmp_path: Path, whole: KilledRun) -> None:
    kill_at_many_moments(tmp_path, whole, "docker", DOCKER_KILLS)


def tear_files(run: KilledRun) -> Path:
    """Cuts all that may be half written, and returns the log that lost its last response."""
    with (run.path / "episodes.jsonl").open("a") as rows:
        rows.write('{"episode_id": "task-0__0')
    (run.path / "sessions.jsonl").write_text('{"started": 1')
    log = max((run.path / "responses").glob("*.jsonl"), key=lambda path: path.stat().st_size)
    unfinished = [path for path in (run.path / "trajectories").iterdir() if b"\n]" not in path.read_bytes()]
    for path in (log, *unfinished):
        path.write_bytes(path.read_bytes()[:-9])
    (run.path / "trajectories" / "empty.json").touch()
    (run.path / "responses" / ".x.jsonl.1.tmp").write_text("{")
    return log


def test_killed_run_resumes_to_the_same_results(killed: KilledRun, whole: KilledRun) -> None:
    kept = records(killed.path)
    with RunDir(killed.path).owned(resume=True):
        assert killed.resume() == 2
    assert "is running in another process" in killed.said
    test = killed.directory / "tasks" / "task-1" / "tests" / "test.sh"
    test.write_text(f"{TEST}# changed\n")
    assert killed.resume() == 2
    assert "the files of 1 task have changed (task-1)" in killed.said
    test.write_text(TEST)
    log = tear_files(killed)
    (killed.directory / "elsewhere").mkdir()
    assert killed.execute(Moment(), "resume=../run", "concurrency=1", cwd="elsewhere") == 0, killed.said
    killed.kills += 1  # the torn answer is lost, too
    assert log.stem in killed.tries
    check(killed, whole)
    rows = (killed.path / "episodes.jsonl").read_bytes()
    assert killed.resume() == 0, killed.said
    assert (killed.path / "episodes.jsonl").read_bytes() == rows
    assert records(killed.path) == kept
    check(killed, whole)


@pytest.mark.nightly  # the daily run has `test_resumable_policy` and `test_response_log`
@pytest.mark.parametrize(
    ("first_takes_sec", "command"),
    [pytest.param(60, APPEND, id="no response"), pytest.param(2.5, "sleep 1", id="during a command")],
)
def test_timed_out_stage_ends_again(tmp_path: Path, first_takes_sec: float, command: str) -> None:
    check_time_is_up_again(tmp_path, first_takes_sec=first_takes_sec, command=command, snapshot="none")


def check_time_is_up_again(tmp_path: Path, *, first_takes_sec: float, command: str, snapshot: str) -> None:
    make_tasks(tmp_path, [TWO_STEPS.replace("'one'", "'one'\nagent.timeout_sec = 3.0")])
    with CountingEndpoint(turns=(3, 3), command=command) as server:
        server.first_takes_sec = first_takes_sec
        run = KilledRun(tmp_path, server, overrides=["attempts=1", f"snapshot={snapshot}"], is_warm=True)
        assert run.start(Moment(requests=3)) == -signal.SIGKILL, run.said
        assert {turn.stage for turn in server.asked} == {0, 1}
        assert run.resume() == 0, run.said
        [last] = run.final.values()
        assert [stage["truncated_by"] for stage in last["stages"]] == ["time", None]
        assert last["replayed"]["diverged_at"] is None
        assert server.asked.total() - len(server.asked) <= run.kills
