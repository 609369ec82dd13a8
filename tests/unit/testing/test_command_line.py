"""`python -m ares_exp.testing`: the column of a part of one's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ares_exp.testing import command_line
from tests.conftest import ROOT, SECRET_FREE
from tests.unit.environments.test_ares_adapter import stub as stub  # the fixture

pytestmark = pytest.mark.once

PARTS = """
from ares_exp.trackers.null_tracker import NullTracker
from ares_exp.trajectories.collectors.json_collector import JsonTrajectoryCollector

class Fails(NullTracker):
    def finish(self, summary):
        if not summary.results:
            raise ZeroDivisionError

class Kept(JsonTrajectoryCollector):
    def __init__(self, folder, number):
        assert number == 3
        super().__init__(folder)
"""
SUITE = """
import pytest
from ares_exp.testing.tracker_contract import TrackerContract
from my_parts import Fails

class TestMine(TrackerContract):
    @pytest.fixture
    def tracker(self):
        return Fails()
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the command in a folder with `my_parts.py` in it."""
    (tmp_path / "my_parts.py").write_text(PARTS)

    def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        paths = f"{ROOT}:{path}" if path is not None else str(ROOT)
        return subprocess.run(
            [sys.executable, "-m", "ares_exp.testing", *arguments],
            cwd=tmp_path,
            env={**SECRET_FREE, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return run


def test_columns_of_two_parts(run: Run) -> None:
    done = run("tracker", "my_parts.Fails", "ares_exp.trackers.null_tracker.NullTracker")
    assert done.returncode == 1
    head, rule, *rows = done.stdout.splitlines()
    assert (head, rule) == ("| | Fails | NullTracker |", "|---|---|---|")
    assert "| it records a run | yes | yes |" in rows
    assert [row for row in rows if "no" in row.split()] == ["| a run without episodes | no | yes |"]
    assert (
        "a run without episodes:\n    ZeroDivisionError\n    in: raise ZeroDivisionError  (my_parts.py:8)"
        in done.stderr
    )
    assert "def test_" not in done.stderr, "no code of the suite"


@pytest.mark.nightly
def test_options_of_the_part(run: Run) -> None:
    done = run("collector", "my_parts.Kept", "--option", "folder={tmp}/x", "--option", "number=3")
    assert done.returncode == 0, done.stderr
    assert "| concurrent episodes are kept apart | yes |" in done.stdout.splitlines()


@pytest.mark.nightly
def test_a_test_file_of_the_users_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\nmarkers = slow\n")
    (tmp_path / "test_mine.py").write_text(f"{SUITE}\npytestmark = __import__('pytest').mark.slow\n")
    done = run("tracker", "test_mine.py")
    assert done.returncode == 1
    assert "| a run without episodes | no |" in done.stdout.splitlines()


def test_what_cannot_be_imported(run: Run) -> None:
    done = run("tracker", "my_parts.Missing")
    assert done.returncode == 1
    assert "`my_parts.Missing` is not to be had: the module `my_parts`" in done.stderr
    assert done.stderr.count("the module `my_parts`") == 1, "once for all tests"
    assert "The above exception was the direct cause" in run("tracker", "my_parts.Missing", "--traceback").stderr


@pytest.mark.nightly
def test_an_agent_and_a_source_that_need_something_beside_them(run: Run, stub: Path) -> None:
    done = run("agent", "ares_exp.agents.shell_agent.ShellAgentFactory", "--reply", "Hm.", "--reply", "Hm?")
    assert done.returncode == 0, done.stderr
    done = run("source", "ares_exp.environments.ares.source.AresEnvironments", "--option", "preset=echo:0:3", path=stub)
    assert done.returncode == 0, done.stderr
    assert "| an episode begins | yes |" in done.stdout.splitlines()


@pytest.mark.nightly
def test_an_environment_of_another_package(run: Run) -> None:
    path = ROOT / "tests" / "e2e" / "ares_nim"
    done = run("environment", "ares_nim.environment.Nim", "--option", "matches=6", "--reply", "1", path=path)
    assert done.returncode == 0, done.stderr
    assert "| no step before the first reset | yes |" in done.stdout.splitlines()
    assert "| truncating | - |" in done.stdout.splitlines()


def test_a_package_that_is_missing_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    assert command_line.main(["agent", "any.Agent"]) == 2
    assert capsys.readouterr().err == "error: The suite is run by pytest: pip install pytest.\n"
    assert command_line.main(["container", "any.Factory"]) == 2
    assert capsys.readouterr().err.endswith("pip install pytest pytest-asyncio.\n")


def test_help_and_mistakes(run: Run) -> None:
    assert "package.Name, or a test file" in run("--help").stdout
    assert run("wheel", "my_parts.Fails").returncode == 2
