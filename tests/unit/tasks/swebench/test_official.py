"""Grading by the official harness, and by us, on the same logs. Runs where the package swebench is installed."""

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
from ares_exp.tasks.swebench.eval_commands import marked
from ares_exp.tasks.swebench.grading import Expectation, grade
from ares_exp.tasks.swebench.log_parsers import LOG_PARSERS
from ares_exp.tasks.swebench.official import official_grade, official_version
from tests.conftest import ROOT
from tests.unit.tasks.swebench.test_log_parsers import PYTEST

needs_harness = pytest.mark.skipif(official_version() is None, reason="the package swebench is not installed")

SUMMARY = """\
PASSED t.py::fix
PASSED t.py::kept[a b]
SKIPPED [1] t.py:3: why
XFAIL t.py::known
ERROR t.py::broken
FAILED t.py::bad - assert x - y
"""
LOGS = [
    (SUMMARY.replace("PASSED", "\x1b[32mPASSED\x1b[0m"), 1),
    (PYTEST, 1),
    ("PASSED t.py::fix\n", 0),
    ("PASSED t.py::fix\n", 1),
    ("no tests ran\n", 0),
]


@needs_harness
@pytest.mark.parametrize(("output", "exit_code"), LOGS)
async def test_pytest_is_graded_as_by_us(output: str, exit_code: int) -> None:
    log = marked(output, exit_code)
    names = (*LOG_PARSERS["pytest"](output), "t.py::missing", "test_nobody")
    expected = Expectation(names, names, "pytest")
    ours, theirs = grade(log, expected), await official_grade("a-1", log, expected)
    assert ours.fail_to_pass == theirs.fail_to_pass
    assert ours.pass_to_pass == theirs.pass_to_pass
    assert (ours.reason is None) == (theirs.reason is None)


@needs_harness
@pytest.mark.parametrize(
    ("parser", "output", "passed", "failed"),
    [
        ("parse_log_sympy", "test_fix ok\ntest_bad F\n", "test_fix", "test_bad"),
        ("parse_log_django", "test_a (x.T) ... ok\ntest_b (x.T) ... FAIL\n", "test_a (x.T)", "test_b (x.T)"),
        ("parse_log_requests", "PASSED t.py::a[/x/y]\nFAILED t.py::b - no\n", "t.py::a[/y]", "t.py::b"),
        ("parse_log_pytest", "PASSED t.py::a[log(b)]\nFAILED t.py::b\n", "t.py::a[log(", "t.py::b"),
    ],
)
async def test_formats_of_the_published_data_sets(parser: str, output: str, passed: str, failed: str) -> None:
    found = await official_grade("a-1", marked(output, 1), Expectation((passed,), (failed,), parser))
    assert (found.fail_to_pass, found.pass_to_pass) == ({passed: True}, {failed: False})


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
