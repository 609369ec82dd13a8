"""Grading of test runs with the official SWE-bench harness, which is the package `swebench`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ares_exp.containers.child_process import ChildFailedError, ChildProcess
from ares_exp.containers.ownership import short_lived_directory
from ares_exp.errors import VerifierError
from ares_exp.tasks.swebench.rows import SweBenchRow

TIMEOUT_SEC = 300.0
"""Time limit in seconds for grading one log, which is the output of one test run."""

_PROGRAM = Path(__file__).with_name("official_report.py")
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "PYTHONPATH")
_TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS")
_DEFAULT_PARSER = "parse_log_pytest_v2"


Report = dict[str, Any]
"""The harness's report with `grader` (version of the harness) and `reason` (why grading was impossible, or `None`)."""


def rewards(report: Report) -> dict[str, float]:
    """Returns the rewards that follow from a report.

    `reward` is 1 if the issue is resolved, otherwise 0. `f2p` and `p2p` are the fractions of passed tests among the
    row's `FAIL_TO_PASS` and `PASS_TO_PASS`.
    """
    f2p, p2p = (_part(report["tests_status"][name]) for name in _TESTS)
    return {"reward": float(report["resolved"]), "f2p": f2p, "p2p": p2p}


def _part(tests: Mapping[str, Sequence[str]]) -> float:
    good, bad = len(tests["success"]), len(tests["failure"])
    return good / (good + bad) if good + bad else 1.0


def ungraded(row: SweBenchRow, reason: str, *, patch_applied: bool = True) -> Report:
    """Returns a report in which all tests have failed, for a test run that cannot be graded because of `reason`."""
    tests = zip(_TESTS, (row.fail_to_pass, row.pass_to_pass), strict=True)
    return {
        "patch_is_None": False,
        "patch_exists": True,
        "patch_successfully_applied": patch_applied,
        "resolved": False,
        "tests_status": {name: {"success": [], "failure": list(names)} for name, names in tests},
        "reason": reason,
        "grader": f"swebench {official_version()}",
    }


def official_version() -> str | None:
    """Returns the version of the installed harness, without importing it; `None` if it is missing or older than 5."""
    try:
        version = importlib.metadata.version("swebench")
    except importlib.metadata.PackageNotFoundError:
        return None
    major = version.partition(".")[0]
    return version if major.isdecimal() and int(major) >= 5 else None


async def official_report(row: SweBenchRow, log: str) -> Report:
    """Grades `log`, the output of a row's test script, in a child process. Raises `VerifierError` if this fails."""
    child = ChildProcess()
    return await child.stop_if_cancelled(asyncio.to_thread(_grade, child, row, log))


def _grade(child: ChildProcess, row: SweBenchRow, log: str) -> Report:
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
        report: Report = json.loads(paths[2].read_bytes())[row.instance_id]
    except ChildFailedError as error:
        raise VerifierError(f"The official harness could not grade {row.instance_id}: its process {error}.") from None
    except (OSError, ValueError, LookupError) as error:
        raise VerifierError(f"The official harness could not grade {row.instance_id}: {error}") from None
    finally:
        directory.remove()
    if "tests_status" not in report:
        why = report.get("infra_failure_reason")
        reason = "The official harness found no valid test run in the log"
        return ungraded(row, f"{reason} ({why})." if why else f"{reason}.")
    return {**report, "reason": None, "grader": f"swebench {official_version()}"}
