"""Grades of test runs, and the grading of repositories of the user's own by the rules of the official harness.

A row is resolved if its FAIL_TO_PASS and PASS_TO_PASS tests all passed. A test passed if it is `PASSED` or `XFAIL`; one
of PASS_TO_PASS may be skipped, too. A test that the log does not name failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ares_exp.tasks.swebench.eval_commands import END_MARKER, START_MARKER, exit_code_of
from ares_exp.tasks.swebench.log_parsers import ERROR, FAILED, LOG_PARSERS, PASSED, SKIPPED, XFAIL

_GOOD = (PASSED, XFAIL)


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected results of a row's tests.

    Attributes:
        fail_to_pass, pass_to_pass: Names of tests.
        log_parser: Name of the parser of the output.
        eval_type: `fail_only` where the output tells of failures alone: tests without a line passed.
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    log_parser: str
    eval_type: str = "pass_and_fail"


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a test run.

    Attributes:
        fail_to_pass, pass_to_pass: Each test, and whether it did what it had to.
        reason: Why there is nothing to grade; `None` where there is.
        statuses: The status of every test in the log; `None` from the official harness.
    """

    fail_to_pass: Mapping[str, bool]
    pass_to_pass: Mapping[str, bool]
    reason: str | None = None
    statuses: Mapping[str, str] | None = None

    @property
    def rewards(self) -> dict[str, float]:
        """`reward`: 1 if resolved, else 0; `f2p` and `p2p`: the parts of the tests that did what they had to."""
        f2p, p2p = _part(self.fail_to_pass), _part(self.pass_to_pass)
        return {"reward": float(self.resolved), "f2p": f2p, "p2p": p2p}

    @property
    def resolved(self) -> bool:
        """Whether all did."""
        return self.reason is None and all((*self.fail_to_pass.values(), *self.pass_to_pass.values()))

    def report(self, instance_id: str, *, patch_applied: bool, grader: str) -> dict[str, Any]:
        """Returns the grade in the form of the harness's `report.json`, with `reason`, `grader` and `statuses`."""
        tests = {"FAIL_TO_PASS": self.fail_to_pass, "PASS_TO_PASS": self.pass_to_pass}
        return {
            instance_id: {
                "patch_is_None": False,
                "patch_exists": True,
                "patch_successfully_applied": patch_applied,
                "resolved": self.resolved,
                "tests_status": {
                    name: {
                        "success": [test for test, good in found.items() if good],
                        "failure": [test for test, good in found.items() if not good],
                    }
                    for name, found in tests.items()
                },
                "reason": self.reason,
                "grader": grader,
                "statuses": dict(self.statuses or {}),
            }
        }


def _part(found: Mapping[str, bool]) -> float:
    return sum(found.values()) / len(found) if found else 1.0


def nothing_to_grade(expected: Expectation, reason: str) -> Grade:
    """Returns a grade by which all tests failed."""
    return Grade(dict.fromkeys(expected.fail_to_pass, False), dict.fromkeys(expected.pass_to_pass, False), reason)


def grade(log: str, expected: Expectation) -> Grade:
    """Grades a log by a parser of ours.

    Args:
        log: Output of the tests between markers (`eval_commands.marked`), and their exit code.
        expected: What they are to do; the parser is one of `LOG_PARSERS`.
    """
    _, started, rest = log.partition(START_MARKER)
    between, ended, _ = rest.partition(END_MARKER)
    if not (started and ended):
        return nothing_to_grade(expected, "The tests did not run to their end: the log lacks its markers.")
    statuses, exit_code = LOG_PARSERS[expected.log_parser](between), exit_code_of(log)
    if not statuses:
        return nothing_to_grade(expected, f"The log has no result of a test (exit code {exit_code}).")
    if exit_code not in (None, 0) and not {FAILED, ERROR} & set(statuses.values()):
        reason = f"The tests ended with exit code {exit_code}, and the log tells of no failure: it cannot be trusted."
        return nothing_to_grade(expected, reason)
    f2p = {test: statuses.get(test) in _GOOD for test in expected.fail_to_pass}
    p2p = {test: statuses.get(test) in (*_GOOD, SKIPPED) for test in expected.pass_to_pass}
    return Grade(f2p, p2p, statuses=statuses)
