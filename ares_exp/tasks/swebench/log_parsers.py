"""Parsers for the output of a test run: each test is `PASSED`, `FAILED`, `SKIPPED`, `ERROR` or `XFAIL`.

They are for repositories of the user's own; the formats of the published data sets are read by the official harness.
They read the output of untrusted code: they never fail, and their time grows with its length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

STATUSES = ("PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL")
PASSED, FAILED, SKIPPED, ERROR, XFAIL = STATUSES

_COLOUR = re.compile(r"\[\d+m")
_CONTROL = dict.fromkeys(range(1, 32))
_COUNT = re.compile(r"\[\d+\]")
_ENDS = {
    "ok": PASSED, "OK": PASSED, "FAIL": FAILED, "ERROR": ERROR, "expected failure": XFAIL, "unexpected success": FAILED,
}  # fmt: skip

LogParser = Callable[[str], dict[str, str]]


def parse_pytest(log: str) -> dict[str, str]:
    """Reads the lines of `pytest -rA`, a status and a test, and lines of `pytest -v` that end with the status."""
    found: dict[str, str] = {}
    for coloured in log.split("\n"):
        line = _COLOUR.sub("", coloured).translate(_CONTROL)
        if line.startswith(STATUSES):
            words = (line.split(" - ", 1)[0] if line.startswith(FAILED) else line).split()
            if len(words) > 1 and not _is_skip_count(words):
                found[" ".join(words[1:])] = words[0]
        elif line.endswith(STATUSES) and len(words := line.split()) > 1:
            found[" ".join(words[:-1])] = words[-1]
    return found


def _is_skip_count(words: list[str]) -> bool:
    """`SKIPPED [2] tests/test_a.py:3: reason` names no test."""
    return words[0] == SKIPPED and _COUNT.fullmatch(words[1]) is not None


def parse_unittest(log: str) -> dict[str, str]:
    """Reads the lines of `unittest` with verbosity 2: `name ... ok`.

    Output of a test comes between the dots and the result, which then is on another line.
    """
    found: dict[str, str] = {}
    running: str | None = None
    for line in map(str.strip, log.split("\n")):
        name, dots, _ = line.partition(" ... ")
        if dots:
            running = name
        for end, status in _ENDS.items():
            if line.endswith((f" ... {end}", f" ...  {end}")):
                found[line.removesuffix(end).rstrip().removesuffix("...").rstrip()] = status
        if " ... skipped" in line:
            found[line.split(" ... skipped")[0]] = SKIPPED
        if line.startswith(("FAIL: ", "ERROR: ")):
            kind, _, failed = line.partition(": ")
            status = FAILED if kind == "FAIL" else ERROR
            found |= {failed: status, failed.split()[0]: status} if failed.strip() else {}
        if line.startswith("ok") and running is not None:
            found[running] = PASSED
    return found


LOG_PARSERS: Mapping[str, LogParser] = {"pytest": parse_pytest, "unittest": parse_unittest}
