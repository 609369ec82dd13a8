"""`container=host`, tested in a sandbox that has this machine's files: see `sandboxed_host`."""

import re

import pytest

from tests.unit.containers.host_sandbox import run_in_sandbox
from tests.unit.containers.local_containers import needs_local

pytestmark = [needs_local, pytest.mark.root]

_TESTS = "tests/unit/containers/sandboxed_host.py"
_RESUME = "tests/e2e/test_resume_every_option.py::test_interrupted_run_resumes"


@pytest.mark.parametrize(
    ("suite", "least_passed"),
    [
        (f"{_TESTS}::TestHostContract", 40),
        (f"{_TESTS}::TestHostForwardedPorts", 12),
        (f"{_TESTS}::TestHostPaths", 4),
        (f"{_TESTS}::TestHostKilled", 3),
        (f"{_TESTS}::TestHostRuns", 5),
        (f"{_RESUME}[container=host]", 1),
    ],
)
def test_sandboxed_suite_passes(suite: str, least_passed: int) -> None:
    done = run_in_sandbox("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "", suite)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert int(passed[1]) >= least_passed
