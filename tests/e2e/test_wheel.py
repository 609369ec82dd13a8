"""The built wheel runs from any directory: conf, samples and prompts ship inside."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.local
def test_the_main_job_from_the_wheel(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=100)
    [wheel] = tmp_path.glob("ares_exp-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "ares_exp/conf/config.yaml" in names
    assert "ares_exp/py.typed" in names
    assert "ares_exp/agents/templates/system.j2" in names
    assert not [name for name in names if name.startswith(("tests/", "outputs/"))]
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True, timeout=100)
    here = tmp_path / "elsewhere"
    here.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "ares_exp", "tracker=none", "env.limit=2"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mean reward 1.00 [0.34, 1.00] over 2 scored" in done.stdout
    where = [sys.executable, "-c", "import ares_exp; print(ares_exp.__file__)"]
    found = subprocess.run(
        where, cwd=here, env={**os.environ, "PYTHONPATH": str(target)}, capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith(str(target))
