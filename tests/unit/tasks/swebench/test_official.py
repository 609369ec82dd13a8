"""Grading by the official harness, and by us, on the same logs. Runs where the package swebench is installed."""

from __future__ import annotations

import pytest

from ares_exp.errors import VerifierError
from ares_exp.tasks.swebench.eval_commands import marked
from ares_exp.tasks.swebench.grading import Expectation, grade
from ares_exp.tasks.swebench.log_parsers import LOG_PARSERS
from ares_exp.tasks.swebench.official import official_grade, official_version
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
