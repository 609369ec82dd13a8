"""The command line of `ares-exp check-part`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ares_exp.errors import PreflightError
from ares_exp.testing.failures import Failure, told

DESCRIPTION = """\
Runs a conformance suite on parts of your own, and prints which tests pass. A part is what `_target_` of its option
would be, the dotted name of a class; or a test file with a class that inherits the suite. Each is a column.
"""
EPILOG = """\
Examples:
  %(prog)s collector my_package.MyCollector --option output_dir={tmp}
  %(prog)s container my_package.MyFactory --image debian:bookworm-slim
  %(prog)s container tests/test_my_contract.py tests/test_another.py

Exit codes: 0 every test passes; 1 one fails, or a part cannot be tested; 2 the command line is wrong, or pytest is
missing.
"""
EXIT_OK, EXIT_FAILED = 0, 1
TIMEOUT_SEC = 3600.0
MAX_CHARS = 100_000
"""How much of what pytest printed is passed on."""

_MODULE = """
import pytest
from ares_exp.config.targets import import_target
from ares_exp.testing.agent_contract import factory_of
from {module} import {suite}

OPTIONS = {options!r}

class Test{suite}({suite}):
    {attributes}

    @pytest.fixture
    def {fixture}(self, tmp_path):
        options = {{
            name: value.replace("{{tmp}}", str(tmp_path)) if isinstance(value, str) else value
            for name, value in OPTIONS.items()
        }}
        return {made}
"""

_CONTAINER_SPEC = """
    @pytest.fixture
    def spec(self):
        from ares_exp.containers.container import ContainerSpec

        return ContainerSpec("contract", docker_image={image!r}, env={{"FROM_SPEC": "spec", "BOTH": "spec"}})
"""


FIXTURES: Mapping[str, str] = {
    "source": "source",
    "environment": "environment",
    "policy": "policy",
    "collector": "collector",
    "tracker": "tracker",
    "agent": "factory",
    "container": "factory",
}
"""Name of the fixture that gives a suite its part, by the kind of the part."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command."""
    parser.add_argument("kind", choices=FIXTURES, help="what the parts are")
    parser.add_argument("parts", nargs="+", metavar="part", help="package.Name, or a test file")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option that the class is made with",
    )
    parser.add_argument("--reply", action="append", help="agent, environment: what the policy says, in this order")
    parser.add_argument("--image", help="container: image of the containers, where the backend needs one")
    parser.add_argument("--user", help="container: a user of the containers besides root")
    parser.add_argument("--traceback", action="store_true", help="all that pytest says of tests that fail")
    parser.add_argument("--network", action="append", default=[], help="container: a network mode that it offers")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    needed = ("pytest", "pytest_asyncio") if arguments.kind == "container" else ("pytest",)
    if missing := [name.replace("_", "-") for name in needed if find_spec(name) is None]:
        raise PreflightError(f"The suite is run by pytest: pip install {' '.join(missing)}.")
    columns = {part: results_of(part, arguments) for part in arguments.parts}
    print_table(arguments.kind, columns)
    return EXIT_FAILED if "no" in {word for column in columns.values() for word in column.values()} else EXIT_OK


def results_of(part: str, given: argparse.Namespace) -> dict[str, str]:
    """Runs a suite on one part.

    Returns:
        For each test `yes`, `no`, or `-` when all of its cases were skipped.
    """
    with tempfile.TemporaryDirectory(prefix="ares_exp-contract-") as directory:
        report = Path(directory, "report.xml")
        path = os.pathsep.join(filter(None, (str(Path.cwd()), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]  # whatever its marks
        words += ["--junit-xml", str(report), "-o", "junit_family=xunit1"]
        if part.endswith(".py"):
            words.append(part)
        else:
            module = Path(directory, "test_part.py")
            module.write_text(module_for(part, given))
            words += ["-c", os.devnull, "--rootdir", directory, "-o", "asyncio_mode=auto", str(module)]
            if find_spec("pytest_asyncio") is not None:
                words += ["-p", "pytest_asyncio"]
            environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = (
                "1"  # no suite needs others; importing them takes most of it
            )
        run = subprocess.run(
            words,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SEC,
            check=False,
        )
        if not report.exists():
            raise SystemExit(f"{part}: pytest did not run:\n{run.stdout}{run.stderr}")
        found: dict[str, list[str]] = {}
        failures: list[tuple[str, Failure]] = []
        for case in ElementTree.parse(report).iter("testcase"):
            name = case.attrib["name"].partition("[")[0]
            if (failure := Failure.of(case)) is not None:
                failures.append((_sentence(name), failure))
            word = "no" if failure is not None else "-" if case.find("skipped") is not None else "yes"
            found.setdefault(name, []).append(word)
        if not found or (failures and given.traceback):
            sys.stderr.write(run.stdout[-MAX_CHARS:])
        elif failures:
            sys.stderr.write(f"{part}:\n" + "".join(f"{paragraph}\n" for paragraph in told(failures)) + "\n")
        if not found:
            raise SystemExit(f"{part}: no test of the suite was run.")
    return {name: "no" if "no" in words else "yes" if "yes" in words else "-" for name, words in found.items()}


def module_for(part: str, given: argparse.Namespace) -> str:
    """Writes the test module that a user would write for a part."""
    called = f"import_target({part!r})"
    attributes: dict[str, Any] = {}
    if given.kind in ("agent", "environment") and given.reply:
        attributes["replies"] = given.reply
    if given.kind == "container":
        attributes |= {"other_user": given.user, "networks": frozenset(given.network)}
    text = _MODULE.format(
        module=f"ares_exp.testing.{given.kind}_contract",
        suite=_class_name(given.kind),
        options=_options(given.option),
        attributes="\n    ".join(f"{name} = {value!r}" for name, value in attributes.items()) or "pass",
        fixture=FIXTURES[given.kind],
        made=f"factory_of({called}, options)" if given.kind == "agent" else f"{called}(**options)",
    )
    return text + _CONTAINER_SPEC.format(image=given.image) if given.image else text


def print_table(kind: str, columns: Mapping[str, Mapping[str, str]]) -> None:
    """Prints a row for each test of a suite."""
    suite = vars(import_module(f"ares_exp.testing.{kind}_contract"))[_class_name(kind)]
    lines = ["| | " + " | ".join(part.rpartition("/")[2].rpartition(".")[2] for part in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for name in vars(suite):
        if name.startswith("test_"):
            words = " | ".join(column.get(name, "-") for column in columns.values())
            lines.append(f"| {_sentence(name)} | {words} |")
    sys.stdout.write("\n".join(lines) + "\n")


def _class_name(kind: str) -> str:
    return f"{kind.capitalize()}Contract"


def _sentence(test: str) -> str:
    return re.sub(r"^test ", "", test.replace("_", " "))


def _options(given: Sequence[str]) -> dict[str, Any]:
    import yaml

    pairs = (option.partition("=") for option in given)
    return {name: yaml.safe_load(value) if "{tmp}" not in value else value for name, _, value in pairs}
