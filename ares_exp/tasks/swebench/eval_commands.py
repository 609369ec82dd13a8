"""Commands that run the tests of a row: its own script, or a command for rows without one."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from ares_exp.errors import ConfigError, TaskError
from ares_exp.tasks.swebench.rows import SweBenchRow

START_MARKER = ">>>>> Start Test Output"
END_MARKER = ">>>>> End Test Output"
EXIT_MARKER = ">>>>> Test Exit Code"

# Output of the tests is left out: lines like those of the summary would count.
PYTEST = "python -m pytest -rA --show-capture=no {files}"

PUBLISHED = frozenset((
    "astropy/astropy", "django/django", "marshmallow-code/marshmallow", "matplotlib/matplotlib", "mwaskom/seaborn",
    "pallets/flask", "psf/requests", "pvlib/pvlib-python", "pydata/xarray", "pydicom/pydicom", "pylint-dev/astroid",
    "pylint-dev/pylint", "pytest-dev/pytest", "pyvista/pyvista", "scikit-learn/scikit-learn", "sphinx-doc/sphinx",
    "sqlfluff/sqlfluff", "sympy/sympy",
))  # fmt: skip
"""The repositories of the published data sets."""

_NOT_RUN = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Ends of names of files of test patches that hold no tests, by the harness's convention."""

_ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi"
"""The published images of Python repositories have their packages in a conda environment of this name."""


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The commands of one row.

    Attributes:
        script: For `bash`, in the repository.
        log_parser: Name of the parser for what it prints.
        is_rows_own: Whether the script is the row's: it applies the test patch and prints the markers itself.
        probe: A script, for `bash` in the repository, that fails where the image lacks what runs the tests; `None`: not
            to be known before they run.
    """

    script: str
    log_parser: str
    is_rows_own: bool
    probe: str | None = None


def plan_tests(row: SweBenchRow, *, test_command: str | None, log_parser: str | None) -> EvalPlan:
    """Returns how the tests of a row are run.

    Args:
        row: The row.
        test_command: Instead of the row's script; see `check_command`.
        log_parser: Instead of the row's.

    Raises:
        TaskError: Its test patch has no file to run, or it is of a published data set and lacks its script.
    """
    parser = log_parser or row.log_parser or "pytest"
    if row.eval_script and test_command is None:
        return EvalPlan(_with_exit_code(row.eval_script), parser, is_rows_own=True)
    if row.repo in PUBLISHED and test_command is None:
        raise TaskError(
            f"{row.instance_id}: expected a row of a published data set to have an `eval_script`, found none: it is of "
            "an old copy. Load the data set by its name (env.dataset=verified), or set env.test_command."
        )
    files = [path for path in row.test_files.after if not path.endswith(_NOT_RUN)]
    command = test_command or PYTEST
    if not files and ("{files}" in command or "{modules}" in command):
        raise TaskError(
            f"{row.instance_id}: expected its test patch to have files with tests, found none. Set env.test_command to "
            "a command without {files} and {modules}."
        )
    command = command.replace("{files}", shlex.join(files)).replace("{modules}", shlex.join(map(_module, files)))
    probe = _probe(command)
    return EvalPlan(
        f"{_ACTIVATE}\n{command}\n",
        parser,
        is_rows_own=False,
        probe=f"{_ACTIVATE}\n{probe}\n" if probe is not None else None,
    )


def _probe(command: str) -> str | None:
    """Returns a command that fails where the program of a test command, or pytest in its Python, is missing."""
    program = re.match(r"\s*([A-Za-z_][\w.+-]*)(?:\s+-m\s+(pytest)\b|(?=\s|$))", command)
    if program is None:
        return None
    name, runner = program.groups()
    found = f"{{ command -v {name} >/dev/null || {{ echo '{name}: command not found'; exit 127; }}; }}"
    return f"{found} && {name} -c 'import {runner}'" if runner else found


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


def _module(path: str) -> str:
    """The dotted name of a test file."""
    return path.removesuffix(".py").replace("/", ".")


def _with_exit_code(script: str) -> str:
    """The script with the exit code of the tests printed behind the end marker; its own is that of a `git checkout`."""
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
    """Returns the exit code of the tests, if the log has it."""
    match = re.search(rf"{re.escape(EXIT_MARKER)}:\s*(-?\d{{1,9}})", log)
    return int(match[1]) if match else None


def marked(output: str, exit_code: int | None) -> str:
    """Returns the output of tests as the log of a script with markers; those in the output itself are spoilt."""
    plain = output.replace(">>>>> ", ">>>> ")
    return f"{START_MARKER}\n{plain}\n{END_MARKER}\n{EXIT_MARKER}: {exit_code}\n"
