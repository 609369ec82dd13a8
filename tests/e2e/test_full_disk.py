"""Runs whose disk is full, or whose directory is deleted: they stop, and a resume pays for nothing twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import CONCURRENCY, KilledRun, check, make_tasks
from tests.leaks import wait_until
from tests.small_disk import FILLER, mounted_folder, needs_mounts, small_disk

pytestmark = [pytest.mark.once, pytest.mark.local, pytest.mark.timeout(600)]

AT = 8
"""The number of requests after which the disk fails."""


def make(directory: Path, endpoint: CountingEndpoint, *overrides: str) -> KilledRun:
    directory.mkdir(parents=True, exist_ok=True)
    make_tasks(directory)
    return KilledRun(directory, endpoint, overrides=("budget.cost=1000000", *overrides), is_warm=True)


def begin(run: KilledRun, fail: Callable[[], object]) -> int:
    """Starts the run, calls `fail` after some requests, and returns the exit code."""
    reached = run.endpoint.when(AT)
    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(run.begin)
        assert reached.wait(run.patience_sec), run.said
        fail()
        return playing.result()


@pytest.fixture
def endpoint() -> Iterator[CountingEndpoint]:
    with CountingEndpoint() as server:
        yield server


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KilledRun]:
    """A run without a failure."""
    with CountingEndpoint() as server:
        run = make(tmp_path_factory.mktemp("whole"), server)
        assert run.begin() == 0, run.said
        yield run


def check_stopped(run: KilledRun, path: Path, cause: str) -> None:
    """Checks that the run said once where and why it stopped, and sent no more requests."""
    warnings = [line for line in run.said.splitlines() if line.startswith(("warning:", "error:"))]
    warnings = [line for line in warnings if not line.startswith("warning: The artifact")]  # of an episode that ended
    assert len(warnings) == 1, run.said
    assert str(path) in warnings[0]
    assert cause in warnings[0]
    assert f"ares-exp resume={run.path}" in warnings[0]
    assert "Traceback" not in run.said
    assert run.endpoint.asked.total() <= AT + 2 * CONCURRENCY, "requests were sent after the first failed write"


@needs_mounts
@pytest.mark.parametrize("collector", ["json", "jsonl", "parquet"])
def test_run_on_full_disk_resumes_exactly(
    tmp_path: Path, endpoint: CountingEndpoint, whole: KilledRun, collector: str
) -> None:
    run = make(tmp_path, endpoint, f"collector={collector}")
    with small_disk(run.path) as disk:
        assert begin(run, disk.fill) == 1, run.said
        check_stopped(run, run.path, "No space left on device")
        assert {row["outcome"] for row in run.all_rows} <= {"completed", "cancelled"}
        asked = endpoint.asked.total()
        assert run.resume() == 2, "the disk is still full"
        assert "of free disk space" in run.said
        assert endpoint.asked.total() == asked
        disk.free()
        run.kills = 1
        assert run.resume() == 0, run.said
        check(run, whole)
        assert not (run.path / FILLER).exists()


@needs_mounts
def test_run_on_lost_mount_resumes_exactly(tmp_path: Path, endpoint: CountingEndpoint, whole: KilledRun) -> None:
    run = make(tmp_path, endpoint)
    with mounted_folder(tmp_path / "volume", run.path) as mount:
        assert begin(run, mount.unmount) == 1, run.said
        check_stopped(run, run.path, "No such file or directory")
        shutil.rmtree(run.path)  # what the verifiers and collectors of running episodes have made there
        mount.mount()
        run.kills = 1
        assert run.resume() == 0, run.said
        check(run, whole)


def test_run_in_deleted_directory_stops(tmp_path: Path, endpoint: CountingEndpoint) -> None:
    run = make(tmp_path, endpoint)

    def delete() -> None:
        shutil.rmtree(run.path.rename(tmp_path / "deleted"))

    assert begin(run, delete) == 1, run.said
    check_stopped(run, run.path, "No such file or directory")
    assert not (run.path / "episodes.jsonl").exists()
    assert wait_until(lambda: not run.left()), run.left()
