"""Ctrl-C once, twice, SIGTERM and kill -9 in the middle of episodes."""

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import rows
from tests.leaks import processes, wait_until
from tests.warm_start import WarmProcess

pytestmark = pytest.mark.local

MARK = f"61.{uuid.uuid4().int % 10**12:012}"
"""How long the episodes' command sleeps: a number that no other process has in its command line."""
SLEEP = f"policy.replies=['```bash\nsleep {MARK}\n```']"


def sleepers() -> list[int]:
    return [pid for pid, _, _, words in processes() if words.split() == ["sleep", MARK]]


SOON_SEC = 45.0
"""For a machine many times slower than one on which it takes a second; yet the command sleeps longer."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[WarmProcess]:
    process = WarmProcess(
        ["tracker=none", "policy=scripted", SLEEP, "hydra.run.dir=run", "concurrency=4"], cwd=tmp_path
    )
    try:
        assert wait_until(lambda: len(sleepers()) == 4 or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()
        assert wait_until(lambda: not sleepers(), SOON_SEC)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_ctrl_c_records_cancelled_episodes_and_prints_summary(
    running: WarmProcess, tmp_path: Path, number: signal.Signals
) -> None:
    running.send_signal(number)
    out, err = running.communicate(timeout=SOON_SEC)
    assert running.returncode == 130, err
    assert wait_until(lambda: not sleepers(), SOON_SEC)
    ended = rows(tmp_path / "run")
    assert [row["outcome"] for row in ended] == ["cancelled"] * 4
    assert [row["reward"] for row in ended] == [None] * 4
    outcomes = [json.loads(p.read_text())["outcome"] for p in (tmp_path / "run" / "trajectories").glob("*.json")]
    assert outcomes == ["cancelled"] * 4
    assert "cancelled" in out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["interrupted"] is True
    assert "Traceback" not in err


def boxes_of(process: WarmProcess) -> list[str]:
    command = ["pgrep", "-P", str(process.pid), "bwrap"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


UNWINDS_SLOWLY = """
import asyncio
from pathlib import Path
class Policy:
    async def __call__(self, request):
        try:
            Path("asked").touch()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(30)
            raise
"""


def test_second_ctrl_c_exits_immediately(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(UNWINDS_SLOWLY)
    (tmp_path / "options" / "policy").mkdir(parents=True)
    (tmp_path / "options" / "policy" / "slow.yaml").write_text("# unwinds slowly\n_target_: slow.Policy\n")
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ares_exp",
            "--config-dir",
            "options",
            "tracker=none",
            "policy=slow",
            "hydra.run.dir=run",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert wait_until(lambda: len(boxes_of(process)) == 4 or process.poll() is not None)
        assert wait_until((tmp_path / "asked").exists)  # from now on it does not end at the first press
        boxes = boxes_of(process)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "Press Ctrl-C again to exit immediately" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)  # unwinding takes 30 s
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert "cancelled" not in out, "the summary was printed: the first press ended the run"
    assert wait_until(lambda: not [pid for pid, *_ in processes() if str(pid) in boxes], SOON_SEC)


def test_interrupted_sweep_starts_no_further_run(tmp_path: Path) -> None:
    process = WarmProcess(
        ["-m", "tracker=none", "policy=scripted", SLEEP, "seed=1,2", "hydra.sweep.dir=s"], cwd=tmp_path
    )
    try:
        assert wait_until(lambda: sleepers() or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SOON_SEC)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, err
    assert not (tmp_path / "s" / "1").exists()
    assert "Traceback" not in err
