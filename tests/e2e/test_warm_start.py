"""The forks with which the tests of this folder start commands end as new interpreters do."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import SECRET_FREE, run_command
from tests.warm_start import WarmProcess, warm_command

pytestmark = pytest.mark.once


def option(here: Path, code: str) -> tuple[str, ...]:
    """Overrides of a policy that runs this when it is imported."""
    (here / "mine.py").write_text(code)
    (here / "options" / "policy").mkdir(parents=True)
    (here / "options" / "policy" / "mine.yaml").write_text("# mine\n_target_: mine.Policy\n")
    return ("--config-dir", "options", "policy=mine", "env=twenty_questions", "tracker=none")


@pytest.mark.parametrize("words", [("attempts=0",), pytest.param(("--cfg", "job"), marks=pytest.mark.nightly)])
def test_fork_prints_like_a_new_interpreter(tmp_path: Path, words: tuple[str, ...]) -> None:
    new, fork = (
        run_command((*start, *words), tmp_path) for start in ((sys.executable, "-m", "ares_exp"), warm_command())
    )
    assert (fork.returncode, fork.stdout, fork.stderr) == (new.returncode, new.stdout, new.stderr)


def test_signal_ends_a_fork_like_an_interpreter(tmp_path: Path) -> None:
    words = option(tmp_path, f"import os\nos.kill(os.getpid(), {signal.SIGKILL:d})\n")
    assert run_command((*warm_command(), *words), tmp_path).returncode == -signal.SIGKILL


def test_fork_ends_with_its_parent(tmp_path: Path) -> None:
    words = option(tmp_path, "import os, sys, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    command = [*warm_command(), *words]
    with subprocess.Popen(command, cwd=tmp_path, env=SECRET_FREE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 60
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.01)
        pytest.fail(f"process {pid} goes on")


def test_process_gets_signals_and_returns_its_status(tmp_path: Path) -> None:
    code = "import os, sys, time\nprint(os.getpid(), os.getsid(0), flush=True)\nprint('err', file=sys.stderr)\n"
    words = option(tmp_path, f"{code}time.sleep(600)\n")
    process = WarmProcess(words, cwd=tmp_path, env=SECRET_FREE)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{process.pid} {process.pid}\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.startswith("err\n")
    with WarmProcess(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
        killed.kill()
    assert killed.returncode == -signal.SIGKILL
    merged = WarmProcess(["clean", "--no-such"], cwd=tmp_path, stderr=subprocess.STDOUT)
    out, err = merged.communicate(timeout=60)
    assert (merged.returncode, "--no-such" in out, err) == (2, True, "")
