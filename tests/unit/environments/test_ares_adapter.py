"""Environments of the `martian-ares` package: against a stub package with its protocol, and small ones made here.

The real package is tried only where it is installed and asked for: ARES_EXP_LIVE_ARES=<preset>, with a network.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ares_exp.environment import TimeStep
from ares_exp.environments.ares_adapter import AresEnvironment, AresEnvironments, request_from_ares, response_to_ares
from ares_exp.environments.episode_limits import EpisodeLimits, LimitedEnvironment, TimeLimits
from ares_exp.errors import EpisodeStateError, PolicyError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData, Usage
from tests.conftest import SECRET_FREE
from tests.warm_start import warm_command

STUB = {
    "__init__.py": """
import os, threading
if os.environ.get("STUB") == "offline":
    raise ConnectionError("All connection attempts failed")
if os.environ.get("STUB") == "hangs":
    threading.Event().wait()
from ares.registry import info, make
""",
    "llms/response.py": """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    generated_tokens: int
@dataclasses.dataclass(frozen=True)
class TextData:
    content: str
@dataclasses.dataclass(frozen=True)
class LLMResponse:
    data: list
    cost: float
    usage: Usage
""",
    "llms/request.py": """
import dataclasses
@dataclasses.dataclass(frozen=True, kw_only=True)
class LLMRequest:
    messages: list
    temperature: float | None = None
    tool_choice: object = None
    tools: list | None = None
    system_prompt: str | None = None
""",
    "containers/docker.py": "class DockerContainer: pass",
    "containers/daytona.py": "class DaytonaContainer: pass",
    "registry.py": """
import collections, pathlib
from ares.llms import request, response
Info = collections.namedtuple("Info", "name description num_tasks")
TimeStep = collections.namedtuple("TimeStep", "step_type reward discount observation")
LOG = pathlib.Path("stub.log")
def note(text):
    with LOG.open("a") as log:
        log.write(text + "\\n")
class Echo:
    '''Asks for `right`; anything else goes on, up to three steps.'''
    def __init__(self, index, container_factory):
        self.index, self.active, self.said = index, False, []
        note(f"made {index} {container_factory.__name__}")
    async def __aenter__(self):
        self.active = True
        return self
    async def __aexit__(self, *_):
        self.active = False
        note(f"closed {self.index}")
    def ask(self):
        messages = [{"role": "user", "content": f"say right ({self.index})"}, *self.said]
        return request.LLMRequest(messages=messages, temperature=0.5, system_prompt="s")
    async def reset(self):
        assert self.active
        return TimeStep("FIRST", 0.0, 1.0, self.ask())
    async def step(self, action):
        assert isinstance(action, response.LLMResponse) and isinstance(action.usage, response.Usage)
        [piece] = action.data
        if piece.content == "boom":
            raise RuntimeError("Code agent task failed")
        if piece.content in ("right", "wrong"):
            return TimeStep("LAST", float(piece.content == "right"), 0.0, None)
        self.said.append({"role": "assistant", "content": piece.content})
        last = len(self.said) == 3
        return TimeStep("LAST" if last else "MID", 0.0, 1.0, self.ask())
def info(name=None):
    return [Info("echo", "for tests", 8)]
def make(preset_id, *, container_factory=None, tracker=None):
    name, index = preset_id.split(":")
    assert name == "echo"
    return Echo(int(index), container_factory)
""",
}
"""A package with the protocol of martian-ares 0.1.0, as far as it is used, in Python 3.11."""

REPLIES = """# replies for the stub
_target_: ares_exp.policies.scripted.ScriptedPolicy
_convert_: all
replies: {"echo:4": [right], "echo:5": [more, wrong], "echo:6": [more, more, more], "echo:7": [boom], "*": [more, more]}
repeat_last: false
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A folder to put on the path of a process."""
    for name, text in STUB.items():
        (tmp_path / "lib" / "ares" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / "ares" / name).write_text(text)
    (tmp_path / "conf" / "policy").mkdir(parents=True)
    (tmp_path / "conf" / "policy" / "stub.yaml").write_text(REPLIES)
    return tmp_path / "lib"


def run(stub: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command line, with the stub on its path."""
    command = [*warm_command(), "env=ares", "tracker=none", "hydra.run.dir=run", *arguments]
    variables = {**SECRET_FREE, "PYTHONPATH": str(stub), "DOCKER_HOST": "tcp://127.0.0.1:1", **env}
    return subprocess.run(
        [*command, "--config-dir", str(stub.parent / "conf")],
        cwd=stub.parent,
        env=variables,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def rows(stub: Path) -> dict[str, dict[str, Any]]:
    lines = (stub.parent / "run" / "episodes.jsonl").read_text().splitlines()
    return {row["task_name"]: row for row in map(json.loads, lines)}


@pytest.mark.once
@pytest.mark.parametrize("wrapper", ["async", pytest.param("sync", marks=pytest.mark.nightly)])
def test_preset_is_run(stub: Path, wrapper: str) -> None:
    done = run(stub, "policy=stub", "env.preset=echo", "env.tasks=@1/2", f"wrapper={wrapper}")
    assert done.returncode == 1, done.stderr
    found = rows(stub)
    assert {name: (row["outcome"], row["reward"], row["num_steps"]) for name, row in found.items()} == {
        "echo:4": ("completed", 1.0, 1),
        "echo:5": ("completed", 0.0, 2),
        "echo:6": ("truncated", 0.0, 3),
        "echo:7": ("errored", None, 1),
    }
    assert found["echo:7"]["error"] == {"type": "RuntimeError", "message": "Code agent task failed"}
    assert {row["environment_usage"] for row in found.values()} == {None}, "it does not say"
    assert not AresEnvironments(preset="echo").has_solutions, "for the oracle"
    noted = (stub.parent / "stub.log").read_text().splitlines()
    assert sorted(noted) == sorted(
        [f"made {index} DockerContainer" for index in range(4, 8)] + [f"closed {index}" for index in range(4, 8)]
    )


@pytest.mark.once
def test_limit_and_selection_of_a_run_apply(stub: Path) -> None:
    done = run(stub, "policy=stub", "env.preset=echo", "env.tasks=[echo:2]", "limits.steps=2", "env.container=daytona")
    assert done.returncode == 1, "there is no reward: nothing was verified"
    [(name, row)] = rows(stub).items()
    assert (name, row["outcome"], row["reward"], row["error"]["limit"]) == ("echo:2", "truncated", None, "steps")
    assert "made 2 DaytonaContainer" in (stub.parent / "stub.log").read_text()


REFUSED = """
import sys
from ares_exp.environments.ares_adapter import AresEnvironments
from ares_exp.errors import UserError
for preset in sys.argv[1:]:
    try:
        AresEnvironments(preset=preset, import_timeout_sec=10 if preset != "hangs" else 0.1).load(print)
    except UserError as error:
        print(error)
"""


def refusals(stub: Path, *presets: str, **env: str) -> list[str]:
    """What is said of presets that cannot be loaded, by a process with the stub on its path."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, *presets],
        cwd=stub.parent,
        env={**SECRET_FREE, "PYTHONPATH": str(stub), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_unknown_presets_are_refused(stub: Path) -> None:
    unknown, with_selector = refusals(stub, "ecco", "echo:1")
    assert "got 'ecco'. Did you mean `echo`? Available presets: echo." in unknown
    assert "got 'echo:1'. Did you mean `echo`?" in with_selector


def test_broken_package_is_reported(stub: Path) -> None:
    [offline] = refusals(stub, "echo", STUB="offline")
    assert "`import ares` failed with ConnectionError: All connection attempts failed. The package needs" in offline
    [hangs] = refusals(stub, "hangs", STUB="hangs")
    assert "did not end within env.import_timeout_sec=0.1" in hangs
    (stub / "ares" / "__init__.py").write_text("make = 1")
    [another] = refusals(stub, "echo")
    assert "failed with AttributeError: module 'ares' has no attribute 'info'" in another


@pytest.mark.skipif(importlib.util.find_spec("ares") is not None, reason="martian-ares is installed")
def test_missing_package_is_reported(stub: Path) -> None:
    shutil.rmtree(stub / "ares")
    [missing] = refusals(stub, "echo")
    assert "needs the package martian-ares, which is not installed. Run `pip install martian-ares`." in missing
    assert "The package needs Python 3.12 or newer" in missing


def test_requests_are_converted() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    theirs = SimpleNamespace(
        messages=[
            {"role": "user", "content": "u"},
            {"call_id": "1", "name": "f", "arguments": "{}"},
            {"role": "tool", "content": "r", "tool_call_id": "1"},
        ],
        temperature=0.5,
        system_prompt="s",
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
        tool_choice={"type": "tool", "name": "f"},
    )
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    expected = LLMRequest(
        [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_call_id": "1"},
        ],
        temperature=0.5,
        system_prompt="s",
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "f"}},
    )
    assert request_from_ares(theirs) == expected
    assert request_from_ares(expected) == expected, "what has our form already keeps it"
    assert request_from_ares(SimpleNamespace(messages=[], tool_choice="any")).tool_choice == "required"


def test_responses_are_converted() -> None:
    made = response_to_ares(
        LLMResponse([TextData("a"), TextData("b")], cost=0.5, usage=Usage(3, 4), model="m"),
        SimpleNamespace(LLMResponse=dict, TextData=lambda content: content, Usage=dict),
    )
    assert made == {"data": ["a", "b"], "cost": 0.5, "usage": {"prompt_tokens": 3, "generated_tokens": 4}}
    with pytest.raises(PolicyError, match="a tool call"):
        response_to_ares(LLMResponse([ToolCallData("1", "f", "{}")]), None)


class Wrapped:
    """An environment of theirs. `act` does what `step` does."""

    def __init__(self, act: Callable[[], Any] | None = None) -> None:
        self.act, self.closed = act, 0

    async def __aenter__(self) -> Wrapped:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed += 1

    async def reset(self) -> TimeStep[Any]:
        return TimeStep("FIRST", 0.0, 1.0, SimpleNamespace(messages=[]))

    async def step(self, action: Any) -> TimeStep[Any]:
        if self.act is not None:
            await self.act()
        return TimeStep("MID", None, 1.0, SimpleNamespace(messages=[{"role": "user", "content": action}]))


def adapted(wrapped: Wrapped, **options: Any) -> AresEnvironment:
    return AresEnvironment("p:0", make=lambda: wrapped, response=lambda response: response.text, **options)


REPLY = LLMResponse.from_text("hi", usage=Usage(1, 1), cost=0.1)


async def never() -> None:
    await asyncio.Event().wait()


async def test_steps_are_converted() -> None:
    wrapped = Wrapped()
    async with adapted(wrapped) as env:
        first = await env.reset()
        assert first == TimeStep("FIRST", None, None, LLMRequest([]))
        assert await env.step(REPLY) == TimeStep("MID", 0.0, 1.0, LLMRequest([{"role": "user", "content": "hi"}]))
        assert (env.step_count, env.current_task, env.report().task_name) == (1, "p:0", "p:0")
        await env.reset()
        assert (wrapped.closed, env.step_count) == (1, 0)
    assert wrapped.closed == 2
    with pytest.raises(EpisodeStateError, match="has not been reset"):
        await env.step(REPLY)


async def test_slow_or_failing_environment_is_closed() -> None:
    wrapped = Wrapped(never)
    env = adapted(wrapped)
    await env.reset()
    env._timeout_sec = 0.02  # its start may take longer
    with pytest.raises(TimeoutError, match=r"did not take a step within env.timeout_sec=0.02"):
        await env.step(REPLY)
    assert wrapped.closed == 1

    async def fails() -> None:
        raise TimeoutError("of theirs")

    env = LimitedEnvironment(adapted(Wrapped(fails)), EpisodeLimits(time=TimeLimits(agent_timeout_sec=3600)))
    await env.reset()
    with pytest.raises(TimeoutError, match="of theirs"):
        await env.step(REPLY)
    assert env.time_step is None


async def test_failing_close_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Wrapped):
        async def __aexit__(self, *_: object) -> None:
            raise RuntimeError("no daemon")

    env = adapted(Stuck())
    await env.reset()
    await env.close()
    await env.close()
    assert caplog.text.count("may have left its container behind: RuntimeError: no daemon") == 1


@pytest.mark.skipif("ARES_EXP_LIVE_ARES" not in os.environ, reason="only with ARES_EXP_LIVE_ARES=<preset>")
def test_real_package_is_compatible() -> None:
    source = AresEnvironments(preset=os.environ["ARES_EXP_LIVE_ARES"], limit=1)
    [name] = source.load(print)
    assert name.startswith(os.environ["ARES_EXP_LIVE_ARES"])
