"""The tests of a part, run against the lowest and the newest version of the library that it uses.

`python -m tests.soak.version_ranges [NAME …]`, with names of `PARTS`; all without one. The ranges are those of
`pyproject.toml`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PARTS = {
    "openai": ("tests/unit/policies",),
    "daytona": ("tests/daytona",),
    "wandb": ("tests/unit/trackers",),
}


def main(names: Sequence[str]) -> int:
    """Returns 1 if the tests of a part fail at one end of the range of its library."""
    failed = []
    for name in names or PARTS:
        requirement = find_range(name)
        lowest = min(one.version for one in requirement.specifier if one.operator == ">=")
        for end in (f"=={lowest}", str(requirement.specifier)):
            code = run_tests(name, f"{requirement.name}{_extras(requirement)}{end}")
            print(f"{name} {end}: {'passed' if code == 0 else 'FAILED'}", flush=True)
            failed += [name] if code else []
    return int(bool(failed))


def find_range(name: str) -> Requirement:
    """Returns the requirement of `pyproject.toml` for a library."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    return next(found for found in map(Requirement, stated) if found.name == name)


def run_tests(name: str, pinned: str) -> int:
    """Runs the tests of a part in an environment of its own with that version; returns the exit code."""
    with tempfile.TemporaryDirectory(prefix=f"range-{name}-") as directory:
        venv.create(directory, with_pip=True)
        python = str(Path(directory, "bin", "python"))
        has_uv = (
            subprocess.run([sys.executable, "-m", "uv", "--version"], capture_output=True, check=False).returncode == 0
        )
        install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", python]
        install = install if has_uv else [python, "-m", "pip", "install", "-q"]
        subprocess.run([*install, "-e", ".[test]", pinned], cwd=ROOT, check=True)
        tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *PARTS[name]]
        return subprocess.run(tests, cwd=ROOT, check=False).returncode


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
