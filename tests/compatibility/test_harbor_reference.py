"""Puts the table to Harbor's own code. Opt-in: it needs a Python that has Harbor, and minutes for the episodes."""

import os
import subprocess

import pytest

from tests.conftest import ROOT, SECRET_FREE, missing

PYTHON = os.environ.get("ARES_EXP_HARBOR_PYTHON", "")


@pytest.mark.skipif(not PYTHON, reason="set ARES_EXP_HARBOR_PYTHON=<a Python that has harbor 0.25.0>")
@pytest.mark.timeout(1800)
@pytest.mark.once
def test_harbor_matches_the_table() -> None:
    episodes = [] if missing("docker") else ["--episodes"]
    done = subprocess.run(
        [PYTHON, "-m", "tests.compatibility.harbor_reference", *episodes],
        cwd=ROOT,
        env=SECRET_FREE,
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
