"""`container=host`, tested in a sandbox that has this machine's files: see `sandboxed_host`."""

import re

import pytest

from tests.unit.containers.host_sandbox import run_in_sandbox
from tests.unit.containers.local_containers import needs_local

pytestmark = [needs_local, pytest.mark.root, pytest.mark.timeout(600)]

_TESTS = "tests/unit/containers/sandboxed_host.py"
_RESUME = "tests/e2e/test_resume_every_option.py::test_interrupted_run_resumes"
_OTHERS = [f"{_TESTS}::TestHost{name}" for name in ("ForwardedPorts", "Paths", "Killed", "Runs")]
"""They share a sandbox, but not with the contract: it leaves files in `/tmp`."""


@pytest.mark.parametrize(
    ("suites", "least_passed"), [([f"{_TESTS}::TestHostContract"], 40), ([*_OTHERS, f"{_RESUME}[container=host]"], 25)]
)
def test_sandboxed_suites_pass(suites: list[str], least_passed: int) -> None:
    done = run_in_sandbox("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "", *suites, timeout=580)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert int(passed[1]) >= least_passed
