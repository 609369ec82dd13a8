"""Our grading against that of the official harness, on the same logs. Runs where the package swebench is installed."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from ares_exp.errors import VerifierError
from ares_exp.tasks.swebench.child_process import ChildFailedError, ChildProcess
from ares_exp.tasks.swebench.grading import Expectation, grade
from ares_exp.tasks.swebench.log_parsers import LOG_PARSERS
from ares_exp.tasks.swebench.official import official_grade, official_version
from ares_exp.tasks.swebench.test_commands import marked
from tests.conftest import ROOT
from tests.unit.tasks.swebench.test_log_parsers import PYTEST, UNITTEST

needs_harness = pytest.mark.skipif(official_version() is None, reason="the package swebench is not installed")

SUMMARY = """\
PASSED t.py::fix
PASSED t.py::kept[a b]
SKIPPED [1] t.py:3: why
XFAIL t.py::known
ERROR t.py::broken
FAILED t.py::bad - assert x - y
"""
SYMPY = "test_fix ok\ntest_bad F\n___ sympy/a/tests/test_x.py:test_bad ___\ntest_e E\n"
DJANGO = UNITTEST.replace("\nFAIL:\n", "\n") + "test_z (a.T) ... Internal Server Error: /x/\nok\ntest_y (a.T) ...  OK\n"

LOGS = [
    ("parse_log_pytest", SUMMARY),
    ("parse_log_pytest", PYTEST),
    ("parse_log_pytest_v2", PYTEST),
    ("pytest", SUMMARY),
    ("parse_log_astropy", SUMMARY.replace("PASSED", "\x1b[32mPASSED\x1b[0m")),
    ("parse_log_requests", PYTEST),
    ("parse_log_pylint", "PASSED t.py::a[//x/y]\nPASSED t.py::a[/x/*]\nPASSED t.py::a[/x/y]\n"),
    ("parse_log_matplotlib", "PASSED t.py::a[MouseButton.LEFT-3]\nPASSED t.py::b\n"),
    ("parse_log_seaborn", "t.py::a PASSED [ 50%]\nPASSED t.py::b\nFAILED t.py::c - x\n"),
    ("parse_log_sympy", SYMPY),
    ("parse_log_django", DJANGO),
    ("pytest", ""),
    ("pytest", "no tests ran\n"),
]


@needs_harness
@pytest.mark.parametrize(("parser", "output"), LOGS)
@pytest.mark.parametrize("exit_code", [0, 1])
async def test_the_verdicts_are_the_same(parser: str, output: str, exit_code: int) -> None:
    log = marked(output, exit_code)
    names = (*LOG_PARSERS[parser](output), "t.py::missing", "t.py::kept[a", "test_nobody")
    expected = Expectation(names, names, parser)
    ours, theirs = grade(log, expected), await official_grade("a-1", log, expected)
    assert ours.fail_to_pass == theirs.fail_to_pass
    assert ours.pass_to_pass == theirs.pass_to_pass
    assert (ours.reason is None) == (theirs.reason is None)
    good = tuple(name for name, passed in ours.fail_to_pass.items() if passed)
    assert (await official_grade("a-1", log, Expectation(good, good, parser))).resolved == bool(good)


@needs_harness
async def test_a_parser_that_the_harness_lacks_is_told() -> None:
    with pytest.raises(VerifierError, match="parse_log_of_nobody"):
        await official_grade("a-1", marked("PASSED a", 0), Expectation(("a",), (), "parse_log_of_nobody"))


def program(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "program.py"
    path.write_text(text)
    return path


def test_a_program_says_why_it_failed(tmp_path: Path) -> None:
    path = program(tmp_path, "import sys\nassert sys.argv[1:] == ['a', 'b']\nraise ValueError('of itself')\n")
    with pytest.raises(ChildFailedError, match="ValueError: of itself"):
        ChildProcess().run(path, ["a", "b"], env=dict(os.environ), timeout_sec=60)


def test_a_program_has_the_variables_that_it_is_given(tmp_path: Path) -> None:
    path = program(tmp_path, "import os\nassert dict(os.environ).keys() <= {'ONLY', 'LC_CTYPE'}\n")
    ChildProcess().run(path, [], env={"ONLY": "1"}, timeout_sec=60)


def test_a_program_that_never_ends_is_killed(tmp_path: Path) -> None:
    path = program(tmp_path, "import time\ntime.sleep(1000)\n")
    with pytest.raises(ChildFailedError, match=r"killed after 0\.5 s"):
        ChildProcess().run(path, [], env={}, timeout_sec=0.5)


async def test_a_program_can_be_stopped(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "started")
    path = program(tmp_path, f"import time\nopen({str(tmp_path / 'started')!r}, 'w').close()\ntime.sleep(1000)\n")
    child = ChildProcess()
    running = asyncio.create_task(asyncio.to_thread(child.run, path, [], env={}, timeout_sec=100))
    await asyncio.to_thread((tmp_path / "started").read_bytes)
    await asyncio.to_thread(child.stop)
    with pytest.raises(ChildFailedError, match="stopped"):
        await running
    with pytest.raises(ChildFailedError, match="stopped"):
        child.run(path, [], env={}, timeout_sec=100)


def test_a_program_ends_with_the_one_who_started_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid")
    path = program(
        tmp_path,
        f"import os, signal\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nsignal.pause()\n",
    )
    code = (
        "import pathlib\nfrom ares_exp.tasks.swebench.child_process import ChildProcess\n"
        f"ChildProcess().run(pathlib.Path({str(path)!r}), [], env={{}}, timeout_sec=100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as runner:
        watched = os.pidfd_open(int((tmp_path / "pid").read_text()))
        runner.kill()
    ended = select.select([watched], [], [], 30)[0]
    os.close(watched)
    assert ended, "it lives"
