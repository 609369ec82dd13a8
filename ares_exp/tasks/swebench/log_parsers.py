"""What the output of a test run says of each test: `PASSED`, `FAILED`, `SKIPPED`, `ERROR` or `XFAIL`.

The functions go by the names that the official harness gives to those that read the same formats; data sets refer to
them by these names. They read what untrusted code has printed: they never fail, and their time grows with its length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

STATUSES = ("PASSED", "FAILED", "SKIPPED", "ERROR", "XFAIL")
PASSED, FAILED, SKIPPED, ERROR, XFAIL = STATUSES

_COLOUR = re.compile(r"\[\d+m")
_CONTROL = dict.fromkeys(range(1, 32))
_COUNT = re.compile(r"\[\d+\]")
_DJANGO_ENDS = {"ok": PASSED, "OK": PASSED, "FAIL": FAILED, "ERROR": ERROR}
_UNITTEST_ENDS = {**_DJANGO_ENDS, "expected failure": XFAIL, "unexpected success": FAILED}

LogParser = Callable[[str], dict[str, str]]


def _plain(name: str) -> str:
    return name


def parse_pytest(log: str, *, rename: Callable[[str], str] = _plain) -> dict[str, str]:
    """The lines of `pytest -rA`: a status and a test, of whose name what follows a blank is left out."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        status = next((one for one in STATUSES if line.startswith(one)), None)
        words = line.split()
        if status is None or len(words) < 2 or _is_skip_count(words):
            continue
        found[rename(words[1])] = words[0]
    return found


def parse_pytest_whole_names(log: str) -> dict[str, str]:
    """As `parse_pytest`, with whole names and without colours; also lines that end with the status."""
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


def _without_folders(name: str) -> str:
    """A parameter that is a path differs from machine to machine, but for its last part."""
    function, _, parameters = name.partition("[")
    option, bracket, _ = parameters.rpartition("]")
    if not bracket:
        return name
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.rsplit("/", 1)[-1]
    return f"{function}[{option}]"


def _mouse_buttons_as_numbers(name: str) -> str:
    """Which they are depends on the version of Python."""
    return name.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")


def parse_seaborn(log: str) -> dict[str, str]:
    """Lines of pytest with the status before or after the test; failures only with it before."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith((FAILED, PASSED)):
            found[words[1]] = FAILED if line.startswith(FAILED) else PASSED
        elif words[1] == PASSED and f" {PASSED} " in line:
            found[words[0]] = PASSED
    return found


def parse_sympy(log: str) -> dict[str, str]:
    """The lines of sympy's own runner: `test_name ok`, and headings of failures, `____ file.py:test_name ____`."""
    found: dict[str, str] = {}
    ends = {"ok": PASSED, "F": FAILED, "E": ERROR}
    for line in log.split("\n"):
        words = line.split()
        if len(words) == 3 and not words[0].strip("_") and not words[2].strip("_") and ".py:" in words[1]:
            found[words[1]] = FAILED
        elif len(words) > 1 and words[0].startswith("test_") and words[-1] in ends:
            found[words[0]] = ends[words[-1]]
    return found


def parse_unittest(log: str, *, ends: Mapping[str, str] = _UNITTEST_ENDS) -> dict[str, str]:
    """The lines of `unittest` with verbosity 2: `name ... ok`.

    What a test prints comes between the dots and the result, which then has a line of its own.
    """
    found: dict[str, str] = {}
    running: str | None = None
    for line in map(str.strip, log.split("\n")):
        name, dots, _ = line.partition(" ... ")
        if dots:
            running = name
        for end, status in ends.items():
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


def parse_django(log: str) -> dict[str, str]:
    """As `parse_unittest`, without expected failures, and with one test of Django whose name has a line break."""
    found = parse_unittest(log, ends=_DJANGO_ENDS)
    if "--version is equivalent to version" in log:
        found["--version is equivalent to version"] = PASSED
    return found


_parse_pytest_options = partial(parse_pytest, rename=_without_folders)

LOG_PARSERS: Mapping[str, LogParser] = {
    "pytest": parse_pytest_whole_names,
    "unittest": parse_unittest,
    "parse_log_pytest": parse_pytest,
    "parse_log_pytest_options": _parse_pytest_options,
    "parse_log_pytest_v2": parse_pytest_whole_names,
    "parse_log_astroid": parse_pytest,
    "parse_log_astropy": parse_pytest_whole_names,
    "parse_log_django": parse_django,
    "parse_log_flask": parse_pytest,
    "parse_log_marshmallow": parse_pytest,
    "parse_log_matplotlib": partial(parse_pytest, rename=_mouse_buttons_as_numbers),
    "parse_log_pvlib": parse_pytest,
    "parse_log_pydicom": _parse_pytest_options,
    "parse_log_pylint": _parse_pytest_options,
    "parse_log_pyvista": parse_pytest,
    "parse_log_requests": _parse_pytest_options,
    "parse_log_scikit": parse_pytest_whole_names,
    "parse_log_seaborn": parse_seaborn,
    "parse_log_sphinx": parse_pytest_whole_names,
    "parse_log_sqlfluff": parse_pytest,
    "parse_log_sympy": parse_sympy,
    "parse_log_xarray": parse_pytest,
}
"""By name: two of ours, then those of the official harness for repositories in Python."""
