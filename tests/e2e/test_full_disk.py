"""Runs whose disk is full, or whose directory is deleted: they stop, and a resume pays for nothing twice."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.counting_endpoint import CountingEndpoint
from tests.e2e.killed_run import KilledRun, check, check_stopped, make_run
from tests.leaks import wait_until
from tests.small_disk import FILLER, small_disk

pytestmark = [pytest.mark.once, pytest.mark.local, pytest.mark.timeout(600)]

REQUESTS_BEFORE_FAILURE = 8


def make(directory: Path, endpoint: CountingEndpoint, *overrides: str, backend: str = "local") -> KilledRun:
    return make_run(directory, endpoint, "budget.cost=1000000", *overrides, backend=backend)


def check_start(run: KilledRun, fail: Callable[[], object], cause: str) -> None:
    """Starts the run, calls `fail` after some requests, and checks that the run stops because of `cause`."""
    reached = run.endpoint.when(REQUESTS_BEFORE_FAILURE)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run.start)
        assert reached.wait(run.patience_sec), run.said
        fail()
        asked = run.endpoint.asked.total()
        assert running.result() == 1, run.said
    check_stopped(run, asked, cause)


@pytest.fixture
def endpoint() -> Iterator[CountingEndpoint]:
    with CountingEndpoint(latency_sec=0.2) as server:
        yield server


@pytest.mark.root
@pytest.mark.parametrize("collector", ["json", "jsonl"])
def test_run_on_full_disk_resumes_exactly(
    tmp_path: Path, endpoint: CountingEndpoint, whole: KilledRun, collector: str
) -> None:
    run = make(tmp_path, endpoint, f"collector={collector}")
    with small_disk(run.path) as disk:
        check_start(run, disk.fill, "No space left on device")
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


@pytest.mark.parametrize("backend", ["local", pytest.param("docker", marks=pytest.mark.docker)])
def test_run_in_deleted_directory_stops(tmp_path: Path, endpoint: CountingEndpoint, backend: str) -> None:
    run = make(tmp_path, endpoint, backend=backend)

    def delete() -> None:
        shutil.rmtree(run.path.rename(tmp_path / "deleted"))

    check_start(run, delete, "No such file or directory")
    assert not (run.path / "episodes.jsonl").exists()
    assert wait_until(lambda: not run.left()), run.left()


IN_NAMESPACE = """
set -e
mount -t tmpfs -o size=24m tmpfs disk
head -c 21m /dev/zero > disk/filler
code=0
"$0" -m ares_exp env=twenty_questions attempts=20 tracker=none concurrency=8 hydra.run.dir=disk/run 2> said || code=$?
cp disk/run/episodes.jsonl before.jsonl
rm disk/filler
"$0" -m ares_exp resume=disk/run 2>> said
cp disk/run/episodes.jsonl after.jsonl
exit $code
"""


def test_ordinary_user_resumes_run_on_full_disk(tmp_path: Path) -> None:
    namespaces = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*namespaces, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user cannot create a user namespace with mounts")
    (tmp_path / "disk").mkdir()
    done = subprocess.run([*namespaces, "sh", "-c", IN_NAMESPACE, sys.executable], cwd=tmp_path, capture_output=True)
    assert done.returncode == 1, done.stderr
    [warning] = [line for line in (tmp_path / "said").read_text().splitlines() if line.startswith("warning:")]
    assert "No space left on device. Free some disk space, then continue with `ares-exp resume=" in warning
    before, after = (
        Counter((row["task_name"], row["attempt"]) for row in map(json.loads, lines) if row["outcome"] == "completed")
        for lines in ((tmp_path / name).read_text().splitlines() for name in ("before.jsonl", "after.jsonl"))
    )
    assert 0 < len(before) < len(after) == 1200
    assert set(after.values()) == {1}
