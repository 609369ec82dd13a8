"""`pytest --ares-exp-part`: the suites on parts of one's own."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from ares_exp.errors import ConfigError
from ares_exp.testing import part_suites
from tests.conftest import ROOT, SECRET_FREE
from tests.unit.environments.test_ares_adapter import stub as stub  # the fixture

pytestmark = pytest.mark.once

PLUGIN = "ares_exp.testing.plugin"
PARTS = """
from ares_exp.trackers.tracker import NullTracker
from ares_exp.trajectories.collectors import JsonTrajectoryCollector

class Fails(NullTracker):
    def finish(self, summary):
        if not summary.results:
            raise ZeroDivisionError

class Kept(JsonTrajectoryCollector):
    def __init__(self, folder, number):
        assert number == 3
        super().__init__(folder)
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs pytest in a project with tests, marks that leave tests out, and `my_parts.py`."""
    (tmp_path / "my_parts.py").write_text(PARTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -m 'not slow'\nmarkers = slow\n")
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    assert False\n")

    def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        paths = f"{ROOT}:{path}" if path is not None else str(ROOT)
        code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"  # as `pytest`, without `.` in the path
        plugins = ("-p", PLUGIN, "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider")
        return subprocess.run(
            [sys.executable, "-P", "-c", code, *plugins, "-v", *arguments],
            cwd=tmp_path,
            env={**SECRET_FREE, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return run


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """The outcome of each test by `Class::test`."""
    lines = (line.split()[:2] for line in done.stdout.splitlines() if "::Test" in line and line.endswith("%]"))
    return {name.partition("::")[2]: outcome for name, outcome in lines}


def test_installed_packages_have_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"ares_exp": PLUGIN}


def test_plugin_without_a_part_imports_little() -> None:
    code = f"import {PLUGIN}, sys; print(sorted(one for one in sys.modules if one.startswith('ares_exp')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{['ares_exp', 'ares_exp.testing', PLUGIN]}\n"


def test_several_parts_are_tested_with_their_failures(run: Run) -> None:
    done = run("--ares-exp-part=my_parts:Fails", "--ares-exp-part=ares_exp.trackers.tracker:NullTracker")
    assert done.returncode == 1, done.stdout + done.stderr
    outcomes = rows(done)
    assert outcomes["TestFails::test_run_is_recorded"] == "PASSED"
    assert {name for name, outcome in outcomes.items() if outcome == "FAILED"} == {
        "TestFails::test_run_without_episodes_is_recorded"
    }
    assert outcomes["TestNullTracker::test_run_without_episodes_is_recorded"] == "PASSED"
    assert "my_parts.py:8: ZeroDivisionError" in done.stdout
    assert "test_mine" not in done.stdout


@pytest.mark.nightly
def test_part_gets_its_options(run: Run) -> None:
    options = ("--ares-exp-option=folder={tmp}/x", "--ares-exp-option", "number=3")
    done = run("--ares-exp-part=my_parts:Kept", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(done)["TestKept::test_concurrent_episodes_are_separate"] == "PASSED"


def test_part_without_a_suite_is_an_error(run: Run) -> None:
    done = run("--ares-exp-part=my_parts:Missing")
    assert done.returncode != 0
    message = "`my_parts.Missing` cannot be imported: the module `my_parts`"
    assert (done.stdout + done.stderr).count(message) == 1
    assert "Traceback" not in done.stdout + done.stderr
    with pytest.raises(ConfigError, match="Expected pathlib:Path to be the class of an agent, which accepts"):
        part_suites.suites_of(["pathlib:Path"], [])


def test_wrapper_of_an_environment_is_an_environment() -> None:
    module = part_suites.suites_of(["ares_exp.environment:EnvironmentWrapper"], [])
    assert [suite.__mro__[1].__name__ for suite in vars(module).values() if isinstance(suite, type)] == [
        "EnvironmentContract"
    ]


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_suites, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install pytest-asyncio"):
        part_suites.suites_of(["ares_exp.containers.local:LocalContainerFactory"], [])


@pytest.mark.nightly
def test_agent_and_source_are_tested(run: Run, stub: Path) -> None:
    done = run("--ares-exp-part=ares_exp.agents.shell_agent:ShellAgentFactory")
    assert done.returncode == 0, done.stdout
    source = "--ares-exp-part=ares_exp.environments.ares_adapter:AresEnvironments"
    done = run(source, "--ares-exp-option=preset=echo", path=stub)
    assert done.returncode == 0, done.stdout
    assert rows(done)["TestAresEnvironments::test_episode_starts"] == "PASSED"


@pytest.mark.slow
@pytest.mark.local
def test_container_backend_is_tested(run: Run) -> None:
    done = run("--ares-exp-part=ares_exp.containers.local:LocalContainerFactory", "-k", "exit_code or protocols")
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(done)["TestLocalContainerFactory::test_factory_follows_the_protocols"] == "PASSED"
