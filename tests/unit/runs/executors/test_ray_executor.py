"""`executor=ray` without a cluster, and environments in a host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ares_exp.environment import MinimalEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.environments.source import EpisodeParts
from ares_exp.environments.twenty_questions.source import TwentyQuestionsEnvironments
from ares_exp.errors import ConfigError, PreflightError
from ares_exp.runs.executors import remote_host
from ares_exp.runs.executors.executor import RunPlan
from ares_exp.runs.executors.ray_executor import RayExecutor, _in_short
from ares_exp.testing.environment_contract import EnvironmentContract
from ares_exp.wrappers.registry import make
from tests.unit.containers.local_containers import needs_local
from tests.unit.environments.test_ares_adapter import Wrapped, adapted
from tests.unit.runs.executors.hosted import HostedEnvironment
from tests.unit.testing.test_bundled_parts import SUBMIT, code_environment

RUN_WORDS = """
import sys
import ares_exp
game = ["env=twenty_questions", "env.limit=1", "policy=oracle"]
results = ares_exp.run([*game, "tracker=none", "hydra.run.dir=run"], quiet=True)
assert results.exit_code == 0
found = [name for name in sys.modules if name.partition(".")[0] == "ray" or name.endswith("ray_executor")]
assert found == [], found
"""


@pytest.mark.once
def test_a_local_run_does_not_import_ray(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", RUN_WORDS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def parts() -> EpisodeParts:
    factory: Any = None
    return EpisodeParts(factory, factory, EpisodeLimits(), seed=0)


async def test_a_missing_ray_is_a_preflight_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    [check] = RayExecutor().checks(TwentyQuestionsEnvironments(), parts())
    with pytest.raises(PreflightError, match=r"pip install 'ares-exp\[ray\]'"):
        await check


async def test_parts_given_as_objects_are_rejected() -> None:
    executor = RayExecutor()
    ran = RunPlan(source=TwentyQuestionsEnvironments(), task_names=(), parts=parts(), recipe=None)
    with pytest.raises(ConfigError, match="given as objects"):
        await executor.open(ran, pytest.fail)
    await executor.close()


def test_ray_error_texts_are_shortened() -> None:
    text = "The actor is dead.\n  \x1b[31mWorker exits: End of file. Some common causes include: (1) the OOM killer."
    assert _in_short(RuntimeError(text)) == "RuntimeError: Worker exits: End of file"


LEAVES = """
import asyncio, atexit, sys, threading, types
from contextlib import suppress
from pathlib import Path

def never(*_):
    threading.Event().wait()

atexit.register(never)
sys.modules["ray"] = types.ModuleType("ray")
sys.modules["ray"].shutdown = sys.modules["ray"].nodes = sys.modules["ray"].kill = never
sys.modules["ray"].is_initialized = lambda: False
sys.modules["ray"].init = lambda **options: None
from ares_exp.environments.source import EpisodeParts
from ares_exp.environments.twenty_questions.source import TwentyQuestionsEnvironments
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import PreflightError
from ares_exp.runs.executors import ray_executor
from ares_exp.runs.executors.executor import RunPlan, Recipe
ray_executor.LEAVE_SEC = ray_executor.RESPONSE_SEC = 0.1

async def main():
    executor = ray_executor.RayExecutor(join_timeout_sec=0.1)
    [check] = executor.checks(None, None)
    await check
    parts = EpisodeParts(None, None, EpisodeLimits(), seed=0)
    recipe = Recipe({}, Path.cwd(), ())
    ran = RunPlan(source=TwentyQuestionsEnvironments(), task_names=(), parts=parts, recipe=recipe)
    with suppress(PreflightError):
        await executor.open(ran, print)
    await ray_executor.RayConnection(None, "a node").end()
    await executor.close()
    print("closed", flush=True)

asyncio.run(main())
"""


def test_a_process_ends_although_ray_hangs() -> None:
    left = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=100, check=False)
    assert left.returncode == 0, left.stderr
    assert left.stdout == "closed\n"
    assert "did not leave the cluster" in left.stderr


@pytest.fixture(autouse=True)
def _long_wait_for_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a host that still waits for news after it has ended exceed the time limit of the contract."""
    monkeypatch.setattr(remote_host, "NEWS_SEC", 60.0)


@needs_local
class TestCodeEnvironment(EnvironmentContract):
    replies = ("Hm.", SUBMIT)

    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        inside = code_environment()
        return HostedEnvironment(lambda: inside)


class TestTwentyQuestions(EnvironmentContract):
    replies = ("Is it alive?",)

    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        inside = make("twenty_questions:0:3")
        return HostedEnvironment(lambda: inside)


class TestAres(EnvironmentContract):
    @pytest.fixture
    def environment(self) -> MinimalEnvironment:
        inside = adapted(Wrapped())
        return HostedEnvironment(lambda: inside)

    def test_timed(self, environment: MinimalEnvironment) -> None:
        """In a run the time of such an environment is kept around it, in the host."""
