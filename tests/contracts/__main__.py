"""Runs the container contract on a backend, or on all that are here, and prints which of its tests pass.

    python -m tests.contracts my_package.MyContainerFactory [--image IMAGE] [--user USER] [--network MODE]…
    python -m tests.contracts

The second prints the table of the README: the local sandbox as root and as an ordinary user, Docker, and Daytona on the
emulator of the service, with local boxes and Docker containers as sandboxes. It takes some minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.contracts.container_contract import ContainerContract
from tests.unit.containers.local_sandbox import as_ordinary_user

ROOT = Path(__file__).parent.parent.parent

_MODULE = """
import importlib
import pytest
from ares_exp.containers.container import ContainerSpec
from tests.contracts.container_contract import ContainerContract

class TestBackend(ContainerContract):
    other_user = {user!r}
    networks = frozenset({networks!r})

    @pytest.fixture
    def factory(self):
        module, _, name = {factory!r}.rpartition(".")
        return getattr(importlib.import_module(module), name)()

    @pytest.fixture
    def spec(self):
        return ContainerSpec("contract", docker_image={image!r}, env={{"FROM_SPEC": "spec", "BOTH": "spec"}})
"""


@dataclass(frozen=True)
class Backend:
    """One column.

    Attributes:
        title: Its heading.
        module: Source of a test module with a subclass of the contract.
        ordinary: Whether an ordinary user runs it.
    """

    title: str
    module: str
    ordinary: bool = False


_LOCAL, _DOCKER, _DAYTONA = (
    ROOT.joinpath(path).read_text()
    for path in (
        "tests/unit/containers/test_local_contract.py",
        "tests/docker/test_docker_contract.py",
        "tests/daytona/test_contract.py",
    )
)
OURS = (
    Backend("local, root", _LOCAL),
    Backend("local, ordinary user", _LOCAL, ordinary=True),
    Backend("docker", _DOCKER),
    Backend("daytona", _DAYTONA),
)


def results_of(backend: Backend) -> dict[str, str]:
    """Per test of the contract: `yes`, `no`, or `-` when all of its cases were skipped."""
    with tempfile.TemporaryDirectory(prefix="ares_exp-contract-") as directory:
        Path(directory).chmod(0o777)
        module, report = Path(directory, "test_backend.py"), Path(directory, "report.xml")
        module.write_text(backend.module)
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
        words += ["--rootdir", str(ROOT), "--junit-xml", str(report), "-o", "junit_family=xunit1", str(module)]
        if backend.ordinary:
            run = as_ordinary_user(*words, timeout=900)
        else:
            run = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env={**os.environ, "ARES_EXP_WHOLE_CONTRACT": "1"},
                capture_output=True,
                text=True,
                timeout=900,
                check=False,
            )
        if not report.exists():
            raise SystemExit(f"{backend.title}: pytest did not run:\n{run.stdout}{run.stderr}")
        found: dict[str, list[str]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            failed = case.find("failure") is not None or case.find("error") is not None
            word = "no" if failed else "-" if case.find("skipped") is not None else "yes"
            found.setdefault(case.attrib["name"].partition("[")[0], []).append(word)
        if "no" in {word for words in found.values() for word in words}:
            print(run.stdout[-4000:], file=sys.stderr)
    return {name: "no" if "no" in words else "yes" if "yes" in words else "-" for name, words in found.items()}


def sentence(test: str) -> str:
    """A test's name as words."""
    return re.sub(r"^test ", "", test.replace("_", " "))


def print_table(backends: list[Backend]) -> bool:
    """Runs and prints; whether nothing failed."""
    columns = [results_of(backend) for backend in backends]
    names = [name for name in vars(ContainerContract) if name.startswith("test_")]
    print("| | " + " | ".join(backend.title for backend in backends) + " |")
    print("|---" * (len(backends) + 1) + "|")
    for name in names:
        print(f"| {sentence(name)} | " + " | ".join(column.get(name, "-") for column in columns) + " |")
    return all(word != "no" for column in columns for word in column.values())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.contracts", description=__doc__)
    parser.add_argument("factory", nargs="?", help="dotted name of a ContainerFactory class")
    parser.add_argument("--image", help="image of the boxes, where the backend needs one")
    parser.add_argument("--user", help="a user of the boxes besides root")
    parser.add_argument("--network", action="append", default=[], help="a network mode that the backend offers")
    given = parser.parse_args()
    module = _MODULE.format(factory=given.factory, image=given.image, user=given.user, networks=given.network)
    backends = list(OURS) if given.factory is None else [Backend(given.factory.rpartition(".")[2], module)]
    sys.exit(0 if print_table(backends) else 1)


if __name__ == "__main__":
    main()
