"""The forks with which the tests of this folder start commands end as new interpreters do."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import SECRET_FREE, run_command
from tests.warm_start import warm_command

pytestmark = pytest.mark.once


@pytest.mark.parametrize("words", [("attempts=0",), pytest.param(("--cfg", "job"), marks=pytest.mark.nightly)])
def test_fork_prints_like_a_new_interpreter(tmp_path: Path, words: tuple[str, ...]) -> None:
    new, fork = (
        run_command((*start, *words), tmp_path) for start in ((sys.executable, "-m", "ares_exp"), warm_command())
    )
    assert (fork.returncode, fork.stdout, fork.stderr) == (new.returncode, new.stdout, new.stderr)


def test_fork_ends_with_its_parent(tmp_path: Path) -> None:
    code = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "options" / "policy").mkdir(parents=True)
    (tmp_path / "options" / "policy" / "mine.yaml").write_text("# mine\n_target_: mine.Policy\n")
    options = ("--config-dir", "options", "policy=mine", "env=twenty_questions", "tracker=none")
    command = [*warm_command(), *options]
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
