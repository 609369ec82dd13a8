"""Grades, and grading by the official harness where the package swebench is installed."""

from typing import Any

import pytest

from ares_exp.errors import VerifierError
from ares_exp.tasks.swebench.rows import SweBenchRow, parse_row
from ares_exp.tasks.swebench.swebench_task import official_report, official_version, rewards, ungraded

needs_harness = pytest.mark.skipif(official_version() is None, reason="the package swebench is not installed")


def with_tests(row: dict[str, Any], passing: str, failing: str, parser: str) -> SweBenchRow:
    return parse_row({**row, "FAIL_TO_PASS": [passing], "PASS_TO_PASS": [failing], "log_parser": parser}, "here")


def log(output: str) -> str:
    return f">>>>> Start Test Output\n{output}\n>>>>> End Test Output\n>>>>> Test Exit Code: 1\n"


@needs_harness
@pytest.mark.parametrize(
    ("parser", "output", "passed", "failed"),
    [
        ("parse_log_sympy", "test_fix ok\ntest_bad F\n", "test_fix", "test_bad"),
        ("parse_log_django", "test_a (x.T) ... ok\ntest_b (x.T) ... FAIL\n", "test_a (x.T)", "test_b (x.T)"),
        ("parse_log_requests", "PASSED t.py::a[/x/y]\nFAILED t.py::b - no\n", "t.py::a[/y]", "t.py::b"),
        ("parse_log_pytest", "PASSED t.py::a[log(b)]\nFAILED t.py::b\n", "t.py::a[log(", "t.py::b"),
        ("", "PASSED t.py::a\nFAILED t.py::b - no\n", "t.py::a", "t.py::b"),
    ],
)
async def test_log_formats_of_published_data_sets_are_graded(
    row: dict[str, Any], parser: str, output: str, passed: str, failed: str
) -> None:
    report = await official_report(with_tests(row, passed, failed, parser), log(output))
    assert rewards(report) == {"reward": 0.0, "f2p": 1.0, "p2p": 0.0}
    assert report["reason"] is None


@needs_harness
async def test_unknown_log_parser_is_an_error(row: dict[str, Any]) -> None:
    with pytest.raises(VerifierError, match="parse_log_of_nobody"):
        await official_report(with_tests(row, "a", "b", "parse_log_of_nobody"), log("PASSED a"))


def test_ungraded_run_has_failed_tests_and_a_reason(row: dict[str, Any]) -> None:
    report = ungraded(with_tests(row, "a", "b", ""), "why")
    assert rewards(report) == {"reward": 0.0, "f2p": 0.0, "p2p": 0.0}
    assert (report["tests_status"]["FAIL_TO_PASS"], report["reason"]) == ({"success": [], "failure": ["a"]}, "why")


def test_rewards_are_fractions_of_tests() -> None:
    tests = {"FAIL_TO_PASS": {"success": ["a"], "failure": ["b"]}, "PASS_TO_PASS": {"success": [], "failure": []}}
    assert rewards({"resolved": False, "tests_status": tests}) == {"reward": 0.0, "f2p": 0.5, "p2p": 1.0}
