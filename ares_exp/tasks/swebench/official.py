"""Grading by the official harness: the package `swebench`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from ares_exp.cancellation import finish
from ares_exp.containers.owned_directory import short_lived_directory
from ares_exp.errors import VerifierError
from ares_exp.tasks.child_process import ChildFailedError, ChildProcess
from ares_exp.tasks.swebench.grading import Expectation, Grade, nothing_to_grade

TIMEOUT_SEC = 300.0
"""Bound on the grading of one log."""

_PROGRAM = Path(__file__).with_name("official_report.py")
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "PYTHONPATH")
_PYTEST = "parse_log_pytest_v2"
"""The harness's name for what we call `pytest`."""


def official_version() -> str | None:
    """Returns the version of the harness; `None` where it is not installed, or is older than 5. Imports nothing."""
    if importlib.util.find_spec("swebench") is None:
        return None
    try:
        version = importlib.metadata.version("swebench")
    except importlib.metadata.PackageNotFoundError:
        return None
    major = version.partition(".")[0]
    return version if major.isdecimal() and int(major) >= 5 else None


async def official_grade(instance_id: str, log: str, expected: Expectation) -> Grade:
    """Has the harness grade a log with markers.

    Raises:
        VerifierError: It failed, or took too long.
    """
    child = ChildProcess()
    grading = asyncio.ensure_future(asyncio.to_thread(_grade, child, instance_id, log, expected))
    try:
        return await asyncio.shield(grading)
    except asyncio.CancelledError:
        await finish(asyncio.to_thread(child.stop))
        await finish(asyncio.wait({grading}))
        raise


def _grade(child: ChildProcess, instance_id: str, log: str, expected: Expectation) -> Grade:
    request = {
        "instance_id": instance_id,
        "FAIL_TO_PASS": expected.fail_to_pass,
        "PASS_TO_PASS": expected.pass_to_pass,
        "log_parser": _PYTEST if expected.log_parser == "pytest" else expected.log_parser,
        "eval_type": expected.eval_type,
    }
    directory = short_lived_directory("verifier")
    try:
        paths = [directory.path / name for name in ("request.json", "log.txt", "report.json")]
        paths[0].write_text(json.dumps(request), encoding="utf-8")
        paths[1].write_text(log, encoding="utf-8", newline="")
        env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
        child.run_python(_PROGRAM, [str(path) for path in paths], env=env, timeout_sec=TIMEOUT_SEC)
        return _read(json.loads(paths[2].read_bytes())[instance_id], expected)
    except ChildFailedError as error:
        raise VerifierError(f"The official harness could not grade {instance_id}: its process {error}.") from None
    except (OSError, ValueError, LookupError) as error:
        raise VerifierError(f"The official harness could not grade {instance_id}: {error}") from None
    finally:
        directory.remove()


def _read(found: dict[str, Any], expected: Expectation) -> Grade:
    tests = found.get("tests_status")
    if tests is None:
        why = found.get("infra_failure_reason")
        reason = "The official harness found no test run in the log that can be trusted"
        return nothing_to_grade(expected, f"{reason} ({why})." if why else f"{reason}.")
    good = {name: frozenset(tests[name]["success"]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    return Grade(
        {test: test in good["FAIL_TO_PASS"] for test in expected.fail_to_pass},
        {test: test in good["PASS_TO_PASS"] for test in expected.pass_to_pass},
    )
