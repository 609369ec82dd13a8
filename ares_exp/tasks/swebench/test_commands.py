"""How a row's tests are run: the script that it brings, or a command of ours for rows without one."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ares_exp.errors import ConfigError, TaskError
from ares_exp.tasks.swebench.rows import SweBenchRow

START_MARKER = ">>>>> Start Test Output"
END_MARKER = ">>>>> End Test Output"
EXIT_MARKER = ">>>>> Test Exit Code"

# What a test prints is left out: lines like those of the summary would count.
PYTEST = "python -m pytest -rA --show-capture=no {files}"
_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {modules}"
_ASTROPY = "python -m pytest -rA -vv -o console_output_style=classic --tb=no {files}"
_SPHINX = "tox --current-env -epy39 -v -- {files}"
_SYMPY = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose {files}"

_NOT_RUN = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Ends of names of files of test patches that hold no tests, by the harness's convention."""

_ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi"
"""The published images of Python repositories have their packages in a conda environment of this name."""


@dataclass(frozen=True, slots=True)
class EvalFormat:
    """How a repository's tests are run, and the name of the parser that reads their output."""

    command: str
    log_parser: str


FORMATS: Mapping[str, EvalFormat] = {
    "astropy/astropy": EvalFormat(_ASTROPY, "parse_log_astropy"),
    "django/django": EvalFormat(_DJANGO, "parse_log_django"),
    "marshmallow-code/marshmallow": EvalFormat(PYTEST, "parse_log_marshmallow"),
    "matplotlib/matplotlib": EvalFormat(PYTEST, "parse_log_matplotlib"),
    "mwaskom/seaborn": EvalFormat(PYTEST, "parse_log_seaborn"),
    "pallets/flask": EvalFormat(PYTEST, "parse_log_flask"),
    "psf/requests": EvalFormat(PYTEST, "parse_log_requests"),
    "pvlib/pvlib-python": EvalFormat(PYTEST, "parse_log_pvlib"),
    "pydata/xarray": EvalFormat(PYTEST, "parse_log_xarray"),
    "pydicom/pydicom": EvalFormat(PYTEST, "parse_log_pydicom"),
    "pylint-dev/astroid": EvalFormat(PYTEST, "parse_log_astroid"),
    "pylint-dev/pylint": EvalFormat(PYTEST, "parse_log_pylint"),
    "pytest-dev/pytest": EvalFormat(PYTEST, "parse_log_pytest"),
    "pyvista/pyvista": EvalFormat(PYTEST, "parse_log_pyvista"),
    "scikit-learn/scikit-learn": EvalFormat(PYTEST, "parse_log_scikit"),
    "sphinx-doc/sphinx": EvalFormat(_SPHINX, "parse_log_sphinx"),
    "sqlfluff/sqlfluff": EvalFormat(PYTEST, "parse_log_sqlfluff"),
    "sympy/sympy": EvalFormat(_SYMPY, "parse_log_sympy"),
}
OTHER = EvalFormat(PYTEST, "pytest")
"""For the repositories that are not listed."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """How one row's tests are run.

    Attributes:
        script: For `bash`, in the repository.
        log_parser: Name of the parser for what it prints.
        is_rows_own: Whether the script is the row's: it applies the test patch and prints the markers itself.
    """

    script: str
    log_parser: str
    is_rows_own: bool


def plan_tests(row: SweBenchRow, *, test_command: str | None, log_parser: str | None) -> EvalPlan:
    """How the tests of a row are run.

    Args:
        row: The row.
        test_command: Instead of what the row or its repository says; see `check_command`.
        log_parser: Likewise.

    Raises:
        TaskError: Its test patch has no file to run.
    """
    known = FORMATS.get(row.repo, OTHER)
    if row.eval_script and test_command is None:
        parser = log_parser or row.log_parser or known.log_parser
        return EvalPlan(_with_exit_code(row.eval_script), parser, is_rows_own=True)
    files = [path for path in row.test_files.after if not path.endswith(_NOT_RUN)]
    command = test_command or known.command
    if not files and ("{files}" in command or "{modules}" in command):
        raise TaskError(
            f"{row.instance_id}: expected its test patch to have files with tests, found none. Set env.test_command to "
            "a command without {files} and {modules}."
        )
    fallback = "pytest" if test_command is not None else known.log_parser
    command = command.replace("{files}", shlex.join(files))
    command = command.replace("{modules}", shlex.join(_modules(row.repo, files)))
    return EvalPlan(f"{_ACTIVATE}\n{command}\n", log_parser or row.log_parser or fallback, is_rows_own=False)


def check_command(command: str | None) -> str | None:
    """Returns the command unchanged: shell source with `{files}`, the test files, or `{modules}`, in dotted names.

    Raises:
        ConfigError: It is empty.
    """
    if command is not None and not command.strip():
        raise ConfigError(
            "Expected `env.test_command` to be a command, got an empty one. Set it to null for the usual."
        )
    return command


def _modules(repo: str, files: list[str]) -> Iterator[str]:
    """Dotted names of test files; those of Django are relative to `tests/`."""
    for path in files:
        inside = path.removeprefix("tests/") if repo == "django/django" else path
        yield posixpath.splitext(inside)[0].replace("/", ".") if inside.endswith(".py") else inside.replace("/", ".")


def _with_exit_code(script: str) -> str:
    """The script, telling behind the end marker what the tests ended with; its own end is that of a `git checkout`."""
    lines = script.split("\n")
    for index, line in enumerate(lines):
        if END_MARKER in line:
            lines[index : index + 1] = [
                "ares_exp_exit_code=$?",
                line,
                f'echo "{EXIT_MARKER}: $ares_exp_exit_code"',
            ]
            break
    return "\n".join(lines)


def exit_code_of(log: str) -> int | None:
    """What the tests ended with, if the log tells."""
    match = re.search(rf"{re.escape(EXIT_MARKER)}:\s*(-?\d{{1,9}})", log)
    return int(match[1]) if match else None


def marked(output: str, exit_code: int | None) -> str:
    """The output of tests as the log of a script with markers; those that the tests have printed are spoilt."""
    plain = output.replace(">>>>> ", ">>>> ")
    return f"{START_MARKER}\n{plain}\n{END_MARKER}\n{EXIT_MARKER}: {exit_code}\n"
