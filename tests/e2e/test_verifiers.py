"""Episodes as rollouts of verifiers, over its own interception, in containers. CI has the package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ares_exp.errors import ConfigError
from ares_exp.training.verifiers import make_plugin
from tests.e2e.conftest import SUBMIT
from tests.e2e.test_training_rows import GREET
from tests.loopback_endpoint import LoopbackEndpoint, error, respond

pytestmark = pytest.mark.local
PLUGIN = """
from ares_exp.training.verifiers import make_plugin

Greetings, GreetingsHarness = make_plugin(env="harbor", overrides=["env.tasks=[write-greeting]"])
__all__ = ["Greetings", "GreetingsHarness"]
"""


def test_missing_verifiers_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match="pip install 'verifiers"):
        make_plugin(env="harbor")


async def rollout(endpoint: LoopbackEndpoint, vf: Any) -> Any:
    """One rollout of the environment that verifiers loads by the name of the plugin."""
    runtime = {"type": "subprocess"}
    environment = vf.load_environment(
        vf.SingleAgentEnvConfig(
            taskset={"id": "greetings"},
            agent={"runtime": runtime, "model": "policy"},
            interception={"type": "server"},
        )
    )
    [task] = list(environment.taskset)
    client = vf.EvalClientConfig(base_url=endpoint.url, api_key_var="ROLLOUT_KEY")
    async with environment.serving():
        return await environment.run_episode(task, vf.ModelContext("policy", client))


@pytest.fixture
def vf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from verifiers import v1 as module

    (tmp_path / "greetings.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ROLLOUT_KEY", "sk-of-the-trainer")
    return module


@pytest.mark.train("verifiers")
async def test_episode_becomes_a_rollout_with_calls(vf: Any) -> None:
    with LoopbackEndpoint() as endpoint:
        endpoint.then(respond(GREET), respond(SUBMIT))
        ran = await rollout(endpoint, vf)
    assert ran.ok, ran.errors
    [trace] = ran.traces
    assert (trace.reward, trace.task.key, trace.num_turns) == (1.0, "write-greeting", 2)
    assert [message.content for message in trace.assistant_messages] == [GREET, SUBMIT]
    assert {one.headers["authorization"] for one in endpoint.requests} == {"Bearer sk-of-the-trainer"}


@pytest.mark.train("verifiers")
async def test_episode_without_response_is_a_failed_rollout(vf: Any) -> None:
    with LoopbackEndpoint(otherwise=error(400, "no such model")) as endpoint:
        ran = await rollout(endpoint, vf)
    assert not ran.ok
    assert ran.traces[0].has_error
