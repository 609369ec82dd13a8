"""Episodes as rollouts of verifiers' server, with its own client and interception. CI has the package."""

import asyncio
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from ares_exp.errors import ConfigError
from ares_exp.training.verifiers import make_plugin
from tests.conftest import Cli
from tests.e2e.conftest import SUBMIT
from tests.e2e.test_training_rows import GREET
from tests.installed_package import python_with
from tests.leaks import wait_until
from tests.loopback_endpoint import LoopbackEndpoint, Received, error, respond

pytestmark = pytest.mark.local
PLUGIN = """
from ares_exp.training.verifiers import make_plugin

Greetings, GreetingsHarness, GreetingsEnv = make_plugin(
    ["env.tasks=[write-greeting]", "tracker=none", "concurrency=2", "hydra.run.dir=run"]
)
__all__ = ["Greetings", "GreetingsHarness", "GreetingsEnv"]
"""
SOLVES = respond(lambda body: SUBMIT if any(one["content"] == GREET for one in body["messages"]) else GREET)


def test_missing_verifiers_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match="pip install 'verifiers"):
        make_plugin(["env=harbor"])


@asynccontextmanager
async def served(plugin: str, endpoint: LoopbackEndpoint) -> AsyncIterator[Callable[[], Any]]:
    """verifiers' server of the environment that it loads by the name of the plugin. Yields the request of a rollout."""
    from verifiers import v1 as vf
    from verifiers.v1.serve import EnvClient, EnvServer

    config = vf.SingleAgentEnvConfig(
        taskset={"id": plugin}, agent={"runtime": {"type": "subprocess"}}, interception={"type": "server"}
    )
    [task] = list(vf.load_environment(config).taskset)
    model = vf.EvalClientConfig(base_url=endpoint.url, api_key_var="ROLLOUT_KEY")
    server = EnvServer(config, address="tcp://127.0.0.1:0")
    serving = asyncio.create_task(server.run())
    client = EnvClient(server.address)
    try:
        await client.wait_for_server_startup()
        yield lambda: client.run(model, "policy", vf.SamplingConfig(), task.data.model_dump(mode="json"))
    finally:
        await client.close()
        serving.cancel()
        await serving


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "greetings.py").write_text(PLUGIN)
    sys.modules.pop("greetings", None)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLOUT_KEY", "sk-of-the-trainer")
    return "greetings"


@pytest.mark.train("verifiers")
async def test_episode_becomes_a_rollout_with_calls(plugin: str) -> None:
    with LoopbackEndpoint(otherwise=SOLVES) as endpoint:
        async with served(plugin, endpoint) as rollout:
            ran = await rollout()
    assert ran.ok, ran.errors
    [trace] = ran.traces
    assert (trace.reward, trace.task.key, trace.num_turns) == (1.0, "write-greeting", 2)
    assert [message.content for message in trace.assistant_messages] == [GREET, SUBMIT]
    assert {one.headers["authorization"] for one in endpoint.requests} == {"Bearer sk-of-the-trainer"}


@pytest.mark.train("verifiers")
@pytest.mark.parametrize(("exported", "message"), [(3, "no such model"), (2, "Export all three classes")])
async def test_episode_without_reward_fails(
    plugin: str, exported: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(plugin)
    monkeypatch.setattr(module, "__all__", module.__all__[:exported])
    with LoopbackEndpoint(otherwise=error(400, "no such model")) as endpoint:
        async with served(plugin, endpoint) as rollout:
            ran = await rollout()
    assert not ran.ok
    assert message in ran.traces[0].last_error.message


@pytest.mark.train("verifiers")
async def test_cancelled_rollout_releases_its_container(plugin: str) -> None:
    answered, gate = asyncio.Semaphore(0), threading.Event()
    loop = asyncio.get_running_loop()

    async def held(request: web.Request, received: Received) -> web.StreamResponse:
        loop.call_soon_threadsafe(answered.release)
        await asyncio.to_thread(gate.wait, 120)
        return await SOLVES(request, received)

    with LoopbackEndpoint(otherwise=held) as endpoint:
        async with served(plugin, endpoint) as rollout:
            first, other = asyncio.create_task(rollout()), asyncio.create_task(rollout())
            async with asyncio.timeout(120):
                await answered.acquire()
                await answered.acquire()
                assert len(containers()) == 2
                first.cancel()
                with suppress(asyncio.CancelledError):
                    await first
            assert await asyncio.to_thread(wait_until, lambda: len(containers()) == 1)
            gate.set()
            assert (await other).ok
        assert containers() == []
    rows = [json.loads(line) for line in Path("run/episodes.jsonl").read_text().splitlines()]
    assert sorted((row["outcome"], row["reward"]) for row in rows) == [("cancelled", None), ("completed", 1.0)]


def containers() -> list[str]:
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "bwrap"], capture_output=True, text=True, check=False)
    return found.stdout.split()


LOADS = """
from verifiers import v1 as vf

environment = vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": "my-org/my-env"}))
harness = vf.load_harness(environment._default_harness)
print([task.key for task in environment.taskset], type(harness).__name__)
"""


@pytest.mark.train("verifiers")
def test_verifiers_loads_a_new_package(cli: Cli, tmp_path: Path) -> None:
    assert cli("task", "new", "my-env", "--for", "verifiers").returncode == 0
    python = python_with(tmp_path / "my-env", tmp_path / "installed")
    shutil.rmtree(tmp_path / "my-env")
    done = subprocess.run([python, "-c", LOADS], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert "['my-task'] EpisodeHarness" in done.stdout, done.stderr
