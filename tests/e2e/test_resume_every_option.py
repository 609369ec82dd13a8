"""Each option of `agent`, `policy`, `container` and `collector`: an interrupted run resumes and reaches its results.

The options are the files in `conf/`. An option without a recipe here fails its test.
"""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import ares_exp
from ares_exp.agents.interception.agent_endpoint import wire_at
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.training.sampled_calls import conversations_of
from ares_exp.trajectories import load
from ares_exp.trajectories.exports.sft_export import sft_rows
from tests import fake_harbor
from tests.conftest import ROOT, rows
from tests.docker.podman_service import missing_program, podman_service
from tests.e2e.daytona_service import DaytonaService
from tests.e2e.test_own_agents import SCRIPTS as OWN_SCRIPTS
from tests.installed_agents import OPTIONS, local_python
from tests.installed_agents import SCRIPTS as INSTALLED_SCRIPTS
from tests.interrupted_policy import INTERRUPT
from tests.loopback_endpoint import Behaviour, LoopbackEndpoint, Received
from tests.token_engine import TokenEngine
from tests.unit.containers.host_sandbox import is_sandbox

pytestmark = pytest.mark.once

TASK = ["env=harbor", "env.tasks=[write-greeting]", "tracker=none", "hydra.run.dir=run"]
PROGRAM = ROOT / "tests" / "data" / "agents" / "chat_agent.py"
GREET = "```bash\necho Hello, harbor! > /app/greeting.txt\n```"
SUBMIT = "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
OPTION = Path("options/policy/interrupted.yaml")
DOCKER, LOCAL, NIGHTLY = pytest.mark.docker, pytest.mark.local, pytest.mark.nightly
SCRIPTS: dict[str, list[Any]] = {
    **OWN_SCRIPTS,
    **INSTALLED_SCRIPTS,
    "shell": [GREET, SUBMIT],
    "command": (COMMAND := ["echo Hello, harbor! > /app/greeting.txt", "DONE"]),
    "harbor": COMMAND,
}
AGENT_OPTIONS = {
    "command": ["agent.command='python3 /opt/agent.py'", f"agent.files={{/opt/agent.py: {PROGRAM}}}"],
    **OPTIONS,
    "harbor": ["agent.name='tests.harbor_classes:ChatAgent'"],
    "mini_swe_agent": [f"agent.pythons=['{local_python()}']"],
}


@dataclass(frozen=True)
class Recipe:
    """How a run with an option is started here.

    Attributes:
        words: Starts what the option needs for the duration of the test, and returns the overrides of the run.
        marks: Marks of the test.
        reward: The expected reward of each attempt.
        interrupted: Whether the run is interrupted after the first response. Otherwise its first session is complete.
    """

    words: Callable[[ExitStack, pytest.MonkeyPatch], list[str]]
    marks: tuple[pytest.MarkDecorator, ...] = (LOCAL,)
    reward: float = 1.0
    interrupted: bool = True


def scripted(replies: list[Any]) -> list[str]:
    """Returns the overrides of a policy that gives these replies and interrupts the run once."""
    option = {"_target_": "tests.interrupted_policy.InterruptedPolicy", "_convert_": "all", "replies": replies}
    OPTION.write_text(json.dumps(option))
    INTERRUPT.touch()
    return ["policy=interrupted"]


def agent(name: str, *marks: pytest.MarkDecorator) -> Recipe:
    def words(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        if name == "harbor":
            fake_harbor.use(monkeypatch)
        return [f"agent={name}", *AGENT_OPTIONS.get(name, []), "container=local", *scripted(SCRIPTS[name])]

    return Recipe(words, (LOCAL, *marks))


def container(
    name: str, *marks: pytest.MarkDecorator, start: Callable[[ExitStack, pytest.MonkeyPatch], None] = lambda *_: None
) -> Recipe:
    def words(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        start(stack, monkeypatch)
        return [f"container={name}", *scripted(SCRIPTS["shell"])]

    return Recipe(words, marks)


def start_daytona(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in stack.enter_context(DaytonaService()).env.items():
        monkeypatch.setenv(name, value)


def start_podman(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking := missing_program():
        pytest.skip(f"{lacking} is not to be had here")
    if os.getuid() != 0:
        pytest.skip("the service of these tests is root's")
    folder = Path("podman").absolute()
    folder.mkdir()
    monkeypatch.setenv("CONTAINER_HOST", stack.enter_context(podman_service(folder)))


async def solve(_: web.Request, received: Received) -> web.StreamResponse:
    """Answers by the wire of the request, with the reply of that turn."""
    wire = wire_at(received.path)
    assert wire is not None
    asked = wire.read(received.body)
    turn = sum(message["role"] == "assistant" for message in asked.request.messages)
    response = LLMResponse.from_text(SCRIPTS["shell"][turn], usage=Usage(10, 5), finish_reason="stop")
    return web.Response(body=wire.whole(asked, response), content_type="application/json")


async def interrupt(_: web.Request, received: Received) -> web.StreamResponse:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()
    raise AssertionError("unreachable: the client disconnects")


def endpoint(name: str, *marks: pytest.MarkDecorator, behaviour: Callable[[], Behaviour] = lambda: solve) -> Recipe:
    def words(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        for key in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
            monkeypatch.setenv(key, "sk-loopback")
        responses = behaviour()
        server = stack.enter_context(LoopbackEndpoint(otherwise=responses))
        server.then(responses, interrupt)
        return [f"policy={name}", "policy.model=m", f"policy.base_url={server.url}", "container=local"]

    return Recipe(words, (LOCAL, *marks))


def replay(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    recorded = ["policy=oracle", "container=local", "hydra.run.dir=recorded"]
    assert ares_exp.run([*TASK[:-1], *recorded], quiet=True).exit_code == 0
    return ["policy=replay", "policy.trajectory=recorded", "container=local"]


def tiny_model(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from tests import tiny_model

    tokenizer = tiny_model.tiny_tokenizer()
    tiny_model.tiny_model(tokenizer).save_pretrained("model")
    tokenizer.save_pretrained("model")
    return ["policy=transformers", "policy.model=model", "policy.max_output_tokens=5", "container=local"]


def require_sandbox(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_sandbox():
        pytest.skip("container=host changes this machine: test_host_container.py runs this test in a sandbox")


RECIPES: dict[str, dict[str, Recipe]] = {
    "agent": {
        **{name: agent(name) for name in ("shell", "command", "harbor")},
        **{name: agent(name, NIGHTLY) for name in ("tools", "terminal")},
        **{name: agent(name, pytest.mark.npm(name), NIGHTLY) for name in (*INSTALLED_SCRIPTS,)},
    },
    "policy": {
        "anthropic": endpoint("anthropic"),
        **{name: endpoint(name, NIGHTLY) for name in ("openai", "openai_responses")},
        "vllm": endpoint("vllm", behaviour=lambda: TokenEngine(SCRIPTS["shell"])),
        "sglang": endpoint("sglang", NIGHTLY, behaviour=lambda: TokenEngine(SCRIPTS["shell"])),
        "noop": Recipe(lambda *_: ["policy=noop", "container=local"], (LOCAL, NIGHTLY), 0.0, interrupted=False),
        "oracle": Recipe(lambda *_: ["policy=oracle", "container=local"], (LOCAL, NIGHTLY), interrupted=False),
        "replay": Recipe(replay, (LOCAL, NIGHTLY), interrupted=False),
        "scripted": Recipe(
            lambda *_: ["policy=scripted", f"policy.replies=['{GREET}','{SUBMIT}']", "container=local"],
            interrupted=False,
        ),
        "transformers": Recipe(tiny_model, (LOCAL, pytest.mark.train), reward=0.0, interrupted=False),
    },
    "container": {
        "daytona": container("daytona", LOCAL, start=start_daytona),
        "docker": container("docker", DOCKER),
        "host": container("host", pytest.mark.root, start=require_sandbox),
        "local": container("local", LOCAL, NIGHTLY),  # the recipes of agents and policies use it
        "podman": container("podman", DOCKER, start=start_podman),
    },
    "collector": {
        name: Recipe(lambda *_, name=name: [f"collector={name}", *scripted(SCRIPTS["shell"])], (LOCAL, NIGHTLY))
        for name in ("json", "jsonl", "memory", "none")  # `json` is the default
    },
}


def options(group: str) -> list[Any]:
    names = sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))
    assert names, f"no options of {group}"
    recipes = RECIPES[group]
    return [
        pytest.param(group, name, marks=recipes[name].marks if name in recipes else (), id=f"{group}={name}")
        for name in names
    ]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    OPTION.parent.mkdir(parents=True)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.mark.parametrize(("group", "name"), [one for group in RECIPES for one in options(group)])
def test_interrupted_run_resumes(group: str, name: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in RECIPES[group], f"Add a recipe for {group}={name} to RECIPES."
    recipe = RECIPES[group][name]
    words = [*TASK, *recipe.words(stack, monkeypatch)]
    if recipe.interrupted:
        with pytest.raises(KeyboardInterrupt):
            ares_exp.run(words, config_dirs=["options"], quiet=True)
        assert [(row["outcome"], row["num_steps"]) for row in rows(Path("run"))] == [("cancelled", 1)]
    else:
        ares_exp.run(words, quiet=True)
        assert [(row["attempt"], row["reward"]) for row in rows(Path("run"))] == [(0, recipe.reward)]

    ares_exp.run(["resume=run", "attempts=2"], quiet=True)
    final = sorted((row for row in rows(Path("run")) if row["outcome"] != "cancelled"), key=lambda row: row["attempt"])
    assert [(row["attempt"], row["reward"]) for row in final] == [(0, recipe.reward), (1, recipe.reward)]
    assert [(row["replayed"] or {}).get("steps") for row in final] == [1 if recipe.interrupted else None, None]
    if group == "agent":
        check_training_rows(final[1]["episode_id"], SCRIPTS[name])
        check_replay(final[1]["episode_id"])
        check_branch(final[1]["episode_id"], SCRIPTS[name][1:])


def check_training_rows(episode: str, replies: list[Any]) -> None:
    [recorded] = [one for one in load(Path("run")).trajectories() if one.episode_id == episode]
    assert conversations_of(recorded) == ["main"] * len(replies)
    rows = list(sft_rows([recorded])[0])
    assert {row["conversation"] for row in rows} == {"main"}
    assert all("greeting.txt" in json.dumps(row["messages"]) for row in rows)
    assert sum(message["role"] == "assistant" for message in rows[-1]["messages"]) >= len(replies)


def check_replay(episode: str) -> None:
    results = ares_exp.run([f"replay=run/{episode}", "hydra.run.dir=again"], quiet=True)
    assert [row.reward for row in results.rows] == [1.0]


def check_branch(episode: str, replies: list[Any]) -> None:
    """Continues an episode after its first step with the rest of the script."""
    scripted(replies)
    INTERRUPT.unlink()
    results = ares_exp.run([f"branch_from=run/{episode}@1", "hydra.run.dir=branch"], quiet=True)
    assert [row.reward for row in results.rows] == [1.0]
    assert results.exit_code == 0
