"""Grades, and grading by the official harness where the package swebench is installed."""

from typing import Any

import pytest

from ares_exp.errors import VerifierError
from ares_exp.tasks.swebench.official import Grade, nothing_to_grade, official_grade, official_version
from ares_exp.tasks.swebench.rows import SweBenchRow, parse_row

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
    found = await official_grade(with_tests(row, passed, failed, parser), log(output))
    assert (found.fail_to_pass, found.pass_to_pass) == ({passed: True}, {failed: False})


@needs_harness
async def test_unknown_log_parser_is_an_error(row: dict[str, Any]) -> None:
    with pytest.raises(VerifierError, match="parse_log_of_nobody"):
        await official_grade(with_tests(row, "a", "b", "parse_log_of_nobody"), log("PASSED a"))


@pytest.mark.parametrize(
    ("fixed", "kept", "rewards"),
    [
        ((True, True), (True,), (1.0, 1.0, 1.0)),
        ((True, False), (True,), (0.0, 0.5, 1.0)),
        ((True, True), (False, True), (0.0, 1.0, 0.5)),
        ((True,), (), (1.0, 1.0, 1.0)),
    ],
)
def test_rewards_are_fractions_of_tests(
    fixed: tuple[bool, ...], kept: tuple[bool, ...], rewards: tuple[float, ...]
) -> None:
    grade = Grade(dict(zip("ab", fixed, strict=False)), dict(zip("cd", kept, strict=False)))
    assert tuple(grade.rewards.values()) == rewards


def test_report_matches_the_harness_format(row: dict[str, Any]) -> None:
    report = Grade({"fix": False, "fix2": True}, {}).report("demo-1", patch_applied=True)["demo-1"]
    assert report["resolved"] is False
    assert report["tests_status"]["FAIL_TO_PASS"] == {"success": ["fix2"], "failure": ["fix"]}
    assert nothing_to_grade(with_tests(row, "a", "b", ""), "why").rewards == {"reward": 0.0, "f2p": 0.0, "p2p": 0.0}
