"""Shared by all tests: the command line as a user runs it, and which backends are here."""

import asyncio
import atexit
import functools
import gc
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import PreflightError
from tests.warm_start import end_warm_start

ROOT = Path(__file__).parent.parent
_SECRET = ("ANTHROPIC_", "OPENAI_", "WANDB_")
SECRET_FREE = {name: value for name, value in os.environ.items() if not name.startswith(_SECRET)}

Cli = Callable[..., subprocess.CompletedProcess[str]]

QUICK = (
    "e2e/test_main_job.py",
    "docker/test_docker_contract.py",
    "docker/test_docker_container.py",
    "docker/test_docker_images.py",
)
"""Tests of `SLOW` folders that say whether this machine can run."""

SLOW = (
    "compatibility/test_harbor_reference.py",
    "daytona/",
    "docker/",
    "e2e/",
    "unit/containers/test_host_container.py",
    "unit/containers/test_leftover_groups.py",
    "unit/containers/test_local_escape.py",
    "unit/containers/test_local_lifetime.py",
    "unit/containers/test_local_ordinary_user.py",
    "unit/environments/test_snapshots_refused.py",
    "unit/environments/test_swebench.py",
    "unit/environments/test_untrusted_containers.py",
    "unit/snapshots/test_hostile_snapshots.py",
    "unit/snapshots/test_killed_writers.py",
    "unit/tasks/swebench/",
    "unit/tasks/task_sources/",
    "unit/trackers/test_wandb",
)
"""Folders and files whose tests have the marker `slow`."""

MARKED = {
    "(root or docker": re.compile(r"\bmark\.(root|docker)\b"),
    "slow and ": re.compile(r"\bmark\.(slow|browser)\b"),
    "train": re.compile(r"\bmark\.train\b"),
    "nightly": re.compile(r"\bmark\.nightly\b|\bby_night\b"),
}
"""How a file says that tests of it may be asked for, by how the question starts."""

WITHOUT_SLOW = re.compile(r"not slow($| and )")


def pytest_configure(config: pytest.Config) -> None:
    """Signals as in a terminal: under `nohup … &` they are ignored, which every process started here inherits."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    gc.set_threshold(50_000, 20, 20)  # with Python's own, collections take some 7 % of a worker's time


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends what the tests of this process have shared, and what modules have started."""
    end_warm_start()
    if hasattr(config, "workerinput"):  # workers of pytest end without: temporary directories of libraries would stay
        with warnings.catch_warnings(action="ignore"):
            atexit._run_exitfuncs()
    gc.unfreeze()  # libraries count what is left at the end


def pytest_xdist_auto_num_workers() -> int:
    """Three workers for two processors, because tests also wait."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processors * 3 // 2


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves files unread where no test of theirs is asked for: to collect all takes each worker many seconds."""
    asked = config.getoption("markexpr")
    if collection_path.suffix != ".py":
        return None
    if WITHOUT_SLOW.match(asked) and is_slow(collection_path):
        return True
    marked = [says for starts, says in MARKED.items() if asked.startswith(starts)]
    if not marked or collection_path.name == "conftest.py" or (asked.startswith("slow") and is_slow(collection_path)):
        return None
    return None if marked[0].search(collection_path.read_text(encoding="utf-8")) else True


@functools.cache
def is_slow(path: Path) -> bool:
    name = path.relative_to(Path(__file__).parent).as_posix()
    return name.startswith(SLOW) and not name.startswith(QUICK)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spares the garbage collector what lives as long as this process: thousands of tests, and what they import."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of `SLOW`, but for those of `QUICK`, and those that are for the night.

    Of a contract that is run in several ways, `by_night` of a class has the tests that say for this way what they
    say for another.
    """
    for item in items:
        if isinstance(item, pytest.Function) and item.originalname in getattr(item.cls, "by_night", ()):
            item.add_marker(pytest.mark.nightly)
        if is_slow(item.path) or item.get_closest_marker("nightly") is not None:
            item.add_marker(pytest.mark.slow)


def run_command(
    command: tuple[str, ...], cwd: Path, env: dict[str, str] | None = None, timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**SECRET_FREE, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "episodes.jsonl").read_text().splitlines()]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the temporary directory of the test the current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Runs `python -m ares_exp …` in an empty directory; `run_dir` is where a single run wrote."""

    def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return run_command((sys.executable, "-m", "ares_exp", *arguments), tmp_path, **more)

    return run


@functools.cache
def missing(backend: str) -> str | None:
    """Why a backend (`docker`, `local`) cannot be used here; `None` when it can."""
    from ares_exp import DockerContainerFactory, LocalContainerFactory
    from ares_exp.containers.local.isolation import container_evidence, find_isolation

    if backend == "local" and sys.platform == "linux" and (found := find_isolation()).isolation != "namespaces":
        where = f"this machine is itself a container ({container_evidence()}): " if container_evidence() else ""
        return f"container=local with private namespaces is not to be had here: {where}{found.problem}"
    factory = {"docker": DockerContainerFactory, "local": LocalContainerFactory}[backend]()
    try:
        asyncio.run(factory.preflight())
    except PreflightError as error:
        return f"container={backend} is not to be had here: {error}"
    return None


@functools.cache
def is_root() -> bool:
    """Whether tests marked `root` can run: the user is root and may mount."""
    from ares_exp.containers.local.isolation import is_privileged

    return is_privileged()


@functools.cache
def missing_agent(name: str) -> str | None:
    """Why an installed agent cannot be run here; `None` when it can."""
    from ares_exp.agents.toolbox.package import PACKAGES
    from ares_exp.agents.toolbox.package_store import AgentStore

    store = AgentStore()
    if any(store.find(build) is not None for build in PACKAGES[name].for_machine()):
        return None
    return f"agent={name} is not to be had here: it is not installed (`ares-exp agents install {name}`)"


@pytest.fixture(autouse=True)
def _skip_without_agent(request: pytest.FixtureRequest) -> None:
    for marker in request.node.iter_markers("npm"):
        if reason := missing_agent(*marker.args):
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def _skip_without_backend(request: pytest.FixtureRequest) -> None:
    for backend in ("docker", "local"):
        if request.node.get_closest_marker(backend) is not None and (reason := missing(backend)):
            pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests marked `root` for an ordinary user, and tests marked `train` if a package is missing.

    Before their fixtures run, which may import that package.
    """
    if item.get_closest_marker("root") is not None and not is_root():
        pytest.skip("needs root with CAP_SYS_ADMIN (marker `root`)")
    marker = item.get_closest_marker("train")
    if marker is None:
        return
    needed = marker.args or ("torch", "transformers")
    if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
        asked = "train" in str(item.config.getoption("markexpr"))
        pytest.skip(f"{' and '.join(lacking)} {'is not to be had here' if asked else 'not installed'} (marker `train`)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails tests skipped for want of a backend, where ARES_EXP_REQUIRE_BACKENDS says that all must be here."""
    report = yield
    if (
        report.skipped
        and os.environ.get("ARES_EXP_REQUIRE_BACKENDS")
        and "is not to be had here" in str(report.longrepr)
    ):
        report.outcome = "failed"
        report.longrepr = f"ARES_EXP_REQUIRE_BACKENDS is set, but: {report.longrepr}"
    return report
