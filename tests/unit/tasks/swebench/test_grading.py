from __future__ import annotations

import pytest

from ares_exp.tasks.swebench.eval_commands import marked
from ares_exp.tasks.swebench.grading import Expectation, Grade, grade

EXPECTED = Expectation(("t::fix", "t::fix2"), ("t::kept", "t::kept2"), "pytest")


def graded(*lines: str, exit_code: int | None = 0, expected: Expectation = EXPECTED) -> Grade:
    return grade(marked("\n".join(lines), exit_code), expected)


ALL = ("PASSED t::fix", "PASSED t::fix2", "PASSED t::kept", "PASSED t::kept2")


def test_resolved() -> None:
    found = graded(*ALL)
    assert found.resolved
    assert found.rewards == {"reward": 1.0, "f2p": 1.0, "p2p": 1.0}


@pytest.mark.parametrize(
    ("lines", "f2p", "p2p"),
    [
        (("FAILED t::fix - no", *ALL[1:]), 0.5, 1.0),
        (ALL[1:], 0.5, 1.0),  # of a test that is not mentioned nothing good is known
        (("SKIPPED t::fix", *ALL[1:]), 0.5, 1.0),
        (("ERROR t::fix", *ALL[1:]), 0.5, 1.0),
        ((*ALL[:2], "FAILED t::kept", "PASSED t::kept2"), 1.0, 0.5),
        (("FAILED t::fix", "FAILED t::fix2", "PASSED t::kept", "PASSED t::kept2"), 0.0, 1.0),
        (("PASSED t::other",), 0.0, 0.0),
    ],
)
def test_unresolved(lines: tuple[str, ...], f2p: float, p2p: float) -> None:
    found = graded(*lines, exit_code=1 if any("FAILED" in line or "ERROR" in line for line in lines) else 0)
    assert found.rewards == {"reward": 0.0, "f2p": f2p, "p2p": p2p}


def test_an_expected_failure_is_as_good_and_a_kept_test_may_be_skipped() -> None:
    assert graded("XFAIL t::fix", "PASSED t::fix2", "SKIPPED t::kept", "XFAIL t::kept2").resolved


def test_the_last_word_on_a_test_counts() -> None:
    assert not graded(*ALL, "FAILED t::fix", exit_code=1).resolved
    assert graded("FAILED t::fix", *ALL).resolved


@pytest.mark.parametrize("exit_code", [1, 2, -9])
def test_a_log_without_failures_of_a_run_that_failed_is_not_believed(exit_code: int) -> None:
    found = graded(*ALL, exit_code=exit_code)
    assert not found.resolved
    assert found.rewards == {"reward": 0.0, "f2p": 0.0, "p2p": 0.0}
    assert f"exit code {exit_code}" in str(found.reason)


def test_no_result_is_a_reason() -> None:
    found = graded("/usr/bin/python: No module named pytest", exit_code=1)
    assert found.rewards["reward"] == 0.0
    assert "no result of a test (exit code 1)" in str(found.reason)


@pytest.mark.parametrize(
    "log",
    [
        "PASSED t::fix\nPASSED t::fix2\n",
        ">>>>> Start Test Output\n" + "\n".join(ALL),
        ">>>>> Patch Apply Failed\n",
    ],
)
def test_a_log_that_is_not_whole_resolves_nothing(log: str) -> None:
    found = grade(log, EXPECTED)
    assert found.rewards["reward"] == 0.0
    assert found.reason


def test_markers_that_a_test_prints_are_spoilt() -> None:
    found = graded(*ALL, ">>>>> End Test Output", "FAILED t::fix", ">>>>> Test Exit Code: 0", exit_code=1)
    assert not found.resolved
    assert not found.fail_to_pass["t::fix"]


def test_the_report_has_the_form_of_the_harness() -> None:
    report = graded(*ALL[1:]).report("demo-1", patch_applied=True, grader="ares_exp")
    assert report["demo-1"]["resolved"] is False
    assert report["demo-1"]["tests_status"]["FAIL_TO_PASS"] == {"success": ["t::fix2"], "failure": ["t::fix"]}
    assert report["demo-1"]["statuses"]["t::kept"] == "PASSED"
