"""Programs in processes of their own: what ends them, and what they are given."""

import asyncio
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ares_exp.containers.child_process import ChildFailedError, ChildProcess
from tests.conftest import ROOT


def program(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(text)
    return path


def test_failed_program_reports_its_error(tmp_path: Path) -> None:
    path = program(tmp_path, "import sys\nassert sys.argv[1:] == ['a', 'b']\nraise ValueError('of itself')\n")
    with pytest.raises(ChildFailedError, match="ValueError: of itself"):
        ChildProcess().run_python(path, ["a", "b"], env=dict(os.environ), timeout_sec=60)


def test_program_gets_only_the_given_variables(tmp_path: Path) -> None:
    path = program(tmp_path, "import os\nassert dict(os.environ).keys() <= {'ONLY', 'LC_CTYPE', 'PWD'}\n")
    ChildProcess().run_python(path, [], env={"ONLY": "1"}, timeout_sec=60)


def test_endless_program_is_killed(tmp_path: Path) -> None:
    path = program(tmp_path, "import time\ntime.sleep(1000)\n")
    with pytest.raises(ChildFailedError, match=r"killed after 0\.5 seconds"):
        ChildProcess().run_python(path, [], env={}, timeout_sec=0.5)


async def test_program_can_be_stopped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    path = program(tmp_path, f"import time\nopen({str(tmp_path / 'started')!r}, 'w').close()\ntime.sleep(1000)\n")
    child = ChildProcess()
    running = asyncio.create_task(asyncio.to_thread(child.run_python, path, [], env={}, timeout_sec=100))
    await asyncio.to_thread((tmp_path / "started").read_bytes)
    await asyncio.to_thread(child.stop)
    with pytest.raises(ChildFailedError, match="stopped"):
        await running
    with pytest.raises(ChildFailedError, match="stopped"):
        child.run_python(path, [], env={}, timeout_sec=100)


def test_program_dies_with_its_parent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    path = program(
        tmp_path, f"import os, signal\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n"
    )
    code = (
        "import pathlib\nfrom ares_exp.containers.child_process import ChildProcess\n"
        f"ChildProcess().run_python(pathlib.Path({str(path)!r}), [], env={{}}, timeout_sec=100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as runner:
        watched = os.pidfd_open(int((tmp_path / "pid").read_text()))
        runner.kill()
    ended = select.select([watched], [], [], 30)[0]
    os.close(watched)
    assert ended, "it lives"


async def test_cancelled_caller_stops_the_program() -> None:
    child, ended = ChildProcess(), threading.Event()

    def work() -> None:
        try:
            child.run(["sleep", "1000"], env=dict(os.environ))
        finally:
            ended.set()

    waiting = asyncio.create_task(child.stop_if_cancelled(asyncio.to_thread(work)))
    await asyncio.sleep(0.2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


def test_child_processes_that_keep_stdout_are_not_waited_for() -> None:
    started = time.monotonic()
    assert ChildProcess().run(["sh", "-c", "setsid sleep 30 & echo done"], env=dict(os.environ)).output == b"done\n"
    with pytest.raises(ChildFailedError, match=r"killed after 0\.5 seconds") as caught:
        ChildProcess().run(["sh", "-c", "setsid sleep 30 & echo why >&2; wait"], env=dict(os.environ), timeout_sec=0.5)
    assert caught.value.errors == ["why"]
    assert time.monotonic() - started < 20


def test_program_reads_its_stdin_and_runs_in_its_directory(tmp_path: Path) -> None:
    ended = ChildProcess().run(["sh", "-c", "cat; pwd"], env=dict(os.environ), cwd=tmp_path, stdin=b"text\n" * 100_000)
    assert ended.output == b"text\n" * 100_000 + f"{tmp_path}\n".encode()
