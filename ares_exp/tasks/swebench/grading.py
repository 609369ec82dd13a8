"""Grading: from what a test run printed to resolved or not, as the official harness (version 5) does.

Resolved is a row whose FAIL_TO_PASS and PASS_TO_PASS tests all passed. A test passed that is `PASSED` or `XFAIL`; one
of PASS_TO_PASS may be skipped, too. A test of which nothing is said failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ares_exp.tasks.swebench.log_parsers import ERROR, FAILED, LOG_PARSERS, PASSED, SKIPPED, XFAIL
from ares_exp.tasks.swebench.test_commands import END_MARKER, START_MARKER, exit_code_of

_GOOD = (PASSED, XFAIL)
_FAILURE_MARKERS = (
    ">>>>> Patch Apply Failed",
    ">>>>> Reset Failed",
    ">>>>> Tests Errored",
    ">>>>> Tests Timed Out",
)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the tests of a row are to do.

    Attributes:
        fail_to_pass, pass_to_pass: Names of tests.
        log_parser: Name of the parser of the output.
        eval_type: `fail_only` where the output tells of failures alone: what it does not tell of passed.
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    log_parser: str
    eval_type: str = "pass_and_fail"


@dataclass(frozen=True, slots=True)
class Grade:
    """What a test run is worth.

    Attributes:
        fail_to_pass, pass_to_pass: Each test, and whether it did what it had to.
        reason: Why there is nothing to grade; `None` where there is.
        statuses: What was read of each test, those that nobody asked for included; empty from the official harness.
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
        """In the form of the official harness's `report.json`, with a `reason`, the `grader` and all `statuses`."""
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
    """All tests failed."""
    return Grade(dict.fromkeys(expected.fail_to_pass, False), dict.fromkeys(expected.pass_to_pass, False), reason)


def grade(log: str, expected: Expectation) -> Grade:
    """Grades a log by our own parsers.

    Args:
        log: What the tests printed, between markers (`test_commands`), and what they ended with.
        expected: What they are to do; the parser is one of `LOG_PARSERS`.
    """
    failure = next((marker for marker in _FAILURE_MARKERS if marker in log), None)
    if failure is not None:
        return nothing_to_grade(expected, f"The log says: {failure.removeprefix('>>>>> ')}.")
    if START_MARKER not in log or END_MARKER not in log:
        return nothing_to_grade(expected, "The tests did not run to their end: the log lacks its markers.")
    parse = LOG_PARSERS[expected.log_parser]
    between = log.split(START_MARKER, 2)[1].split(END_MARKER, 1)[0]
    statuses = parse(between) or parse(log)
    exit_code = exit_code_of(log)
    if not statuses and (expected.eval_type != "fail_only" or exit_code != 0):
        return nothing_to_grade(expected, f"The log has no result of a test (exit code {exit_code}).")
    if exit_code not in (None, 0) and statuses and not {FAILED, ERROR} & set(statuses.values()):
        reason = f"The tests ended with exit code {exit_code}, and the log tells of no failure: it cannot be trusted."
        return nothing_to_grade(expected, reason)
    if expected.eval_type == "fail_only":
        f2p, p2p = (
            {test: statuses.get(test) != FAILED for test in tests}
            for tests in (expected.fail_to_pass, expected.pass_to_pass)
        )
    else:
        f2p = _graded(expected.fail_to_pass, statuses, _GOOD)
        p2p = _graded(expected.pass_to_pass, statuses, (*_GOOD, SKIPPED))
    return Grade(f2p, p2p, statuses=statuses)


def _graded(tests: Iterable[str], statuses: Mapping[str, str], good: Sequence[str]) -> dict[str, bool]:
    return {test: _status(test, statuses) in good for test in tests}


def _status(test: str, statuses: Mapping[str, str]) -> str | None:
    """Of a test; of a name that was cut off inside of its parameter, that of all tests that begin so, if they agree."""
    if test in statuses or test.count("[") <= test.count("]"):
        return statuses.get(test)
    found = [status for name, status in statuses.items() if name.startswith(test)]
    return found[0] if found and len({status in _GOOD for status in found}) == 1 else None
