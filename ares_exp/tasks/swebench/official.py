"""Grading of test runs with the official harness, the package `swebench`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ares_exp.cancellation import finish
from ares_exp.containers.ownership import short_lived_directory
from ares_exp.errors import VerifierError
from ares_exp.tasks.child_process import ChildFailedError, ChildProcess
from ares_exp.tasks.swebench.rows import SweBenchRow

TIMEOUT_SEC = 300.0
"""Time limit in seconds for grading one log."""

_PROGRAM = Path(__file__).with_name("official_report.py")
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "PYTHONPATH")
_DEFAULT_PARSER = "parse_log_pytest_v2"


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of a test run.

    Attributes:
        fail_to_pass, pass_to_pass: For each test, by name, whether it had the expected result.
        reason: Reason that the run cannot be graded; `None` if it was graded.
    """

    fail_to_pass: Mapping[str, bool]
    pass_to_pass: Mapping[str, bool]
    reason: str | None = None

    @property
    def rewards(self) -> dict[str, float]:
        """`reward` (1 if resolved, otherwise 0), and `f2p` and `p2p` (fractions of tests with the expected result)."""
        f2p, p2p = _part(self.fail_to_pass), _part(self.pass_to_pass)
        return {"reward": float(self.resolved), "f2p": f2p, "p2p": p2p}

    @property
    def resolved(self) -> bool:
        """Whether the run was graded and all tests had the expected result."""
        return self.reason is None and all((*self.fail_to_pass.values(), *self.pass_to_pass.values()))

    def report(self, instance_id: str, *, patch_applied: bool) -> dict[str, Any]:
        """Returns the grade in the form of the harness's `report.json`, with `reason` and `grader`."""
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
                "grader": f"swebench {official_version()}",
            }
        }


def _part(found: Mapping[str, bool]) -> float:
    return sum(found.values()) / len(found) if found else 1.0


def nothing_to_grade(row: SweBenchRow, reason: str) -> Grade:
    """Returns a grade for a run that cannot be graded, in which no test has the expected result."""
    return Grade(dict.fromkeys(row.fail_to_pass, False), dict.fromkeys(row.pass_to_pass, False), reason)


def official_version() -> str | None:
    """Returns the version of the harness; `None` if it is not installed or older than 5. Does not import it."""
    if importlib.util.find_spec("swebench") is None:
        return None
    try:
        version = importlib.metadata.version("swebench")
    except importlib.metadata.PackageNotFoundError:
        return None
    major = version.partition(".")[0]
    return version if major.isdecimal() and int(major) >= 5 else None


async def official_grade(row: SweBenchRow, log: str) -> Grade:
    """Makes the harness grade the output of a row's test script.

    Raises:
        VerifierError: The harness failed, or took too long.
    """
    child = ChildProcess()
    grading = asyncio.ensure_future(asyncio.to_thread(_grade, child, row, log))
    try:
        return await asyncio.shield(grading)
    except asyncio.CancelledError:
        await finish(asyncio.to_thread(child.stop))
        await finish(asyncio.wait({grading}))
        raise


def _grade(child: ChildProcess, row: SweBenchRow, log: str) -> Grade:
    request = {
        "instance_id": row.instance_id,
        "FAIL_TO_PASS": row.fail_to_pass,
        "PASS_TO_PASS": row.pass_to_pass,
        "log_parser": row.log_parser or _DEFAULT_PARSER,
        "eval_type": row.eval_type,
    }
    directory = short_lived_directory("verifier")
    try:
        paths = [directory.path / name for name in ("request.json", "log.txt", "report.json")]
        paths[0].write_text(json.dumps(request), encoding="utf-8")
        paths[1].write_text(log, encoding="utf-8", newline="")
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
        child.run_python(_PROGRAM, [str(path) for path in paths], env=env, timeout_sec=TIMEOUT_SEC)
        return _read(json.loads(paths[2].read_bytes())[row.instance_id], row)
    except ChildFailedError as error:
        raise VerifierError(f"The official harness could not grade {row.instance_id}: its process {error}.") from None
    except (OSError, ValueError, LookupError) as error:
        raise VerifierError(f"The official harness could not grade {row.instance_id}: {error}") from None
    finally:
        directory.remove()


def _read(found: dict[str, Any], row: SweBenchRow) -> Grade:
    tests = found.get("tests_status")
    if tests is None:
        why = found.get("infra_failure_reason")
        reason = "The official harness found no valid test run in the log"
        return nothing_to_grade(row, f"{reason} ({why})." if why else f"{reason}.")
    good = {name: frozenset(tests[name]["success"]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    return Grade(
        {test: test in good["FAIL_TO_PASS"] for test in row.fail_to_pass},
        {test: test in good["PASS_TO_PASS"] for test in row.pass_to_pass},
    )
