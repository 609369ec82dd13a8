"""The first commands of the README, with the real agents, against loopback copies of the services that they reach."""

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
import pytest
from aiohttp import web
from pydantic import TypeAdapter

from ares_exp.agents.toolbox.package_store import AgentStore
from ares_exp.llms import anthropic_messages, openai_responses
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData, Usage
from ares_exp.tasks.task_sources.task_lists import HARBOR_REPOSITORY
from tests.compatibility.sources import mirror
from tests.conftest import SECRET_FREE, Cli
from tests.leaks import wait_until
from tests.loopback_endpoint import LoopbackEndpoint, Received
from tests.swebench_rows import REPO, git, make_row, put_harness_on_path, write_rows
from tests.unit.tasks.task_sources.conftest import Repository

pytestmark = [pytest.mark.docker, pytest.mark.npm("claude_code"), pytest.mark.npm("codex")]

TERMINAL_BENCH = (
    *("env=terminal_bench", "agent=claude_code", "policy=anthropic", "policy.model=claude-opus-4-5"),
    *("env.limit=3", "concurrency=3"),
)
SWE_BENCH = (
    *("env=swebench", "agent=codex", "policy=openai_responses", "policy.model=gpt-5.5"),
    *("env.limit=3", "concurrency=3"),
)
TASKS_AT = "https://github.com/laude-institute/terminal-bench-2.git"
TASK_TOML = """\
version = "1.0"
[metadata]
author_name = "A. Uthor"
difficulty = "easy"
[verifier]
timeout_sec = 900.0
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
docker_image = "alexgshaw/{name}:20251031"
cpus = 1
memory = "2G"
storage = "10G"
"""
"""What the tasks of Terminal-Bench 2.0 say."""
TEST = "#!/bin/bash\ngrep -c done /srv/{name}.txt > /logs/verifier/reward.txt\n"
TURNS = ("ls", "echo draft > /srv/{name}.txt", "echo done > /srv/{name}.txt")
FIX = ("ls", "sed -i 's/a - b/a + b/' calc.py", "git diff")
HELD = 1
"""The turn whose requests get no response while `is_holding`."""


class Services(LoopbackEndpoint):
    """Repositories, served by git itself below `/git`, and the endpoints of both vendors, which follow a script.

    Attributes:
        scripts: The commands of each episode, by a text in its instruction.
        asked: How often each turn of these episodes was asked for.
    """

    def __init__(self, repositories: Path, scripts: Mapping[str, Sequence[str]]) -> None:
        super().__init__(otherwise=self._respond)
        self.repositories, self.scripts = repositories, scripts
        self.asked: Counter[tuple[str, int]] = Counter()
        self.is_holding = True

    async def _respond(self, _: web.Request, received: Received) -> web.StreamResponse:
        body, is_anthropic = received.body, received.path == "/v1/messages"
        said = json.dumps(body)
        name = next(name for name in self.scripts if name in said)
        if is_anthropic:
            from anthropic.types.message_create_params import MessageCreateParamsNonStreaming  # slow to import

            TypeAdapter(MessageCreateParamsNonStreaming).validate_python(body)
            turn = [message["role"] for message in body["messages"]].count("assistant")
        else:
            turn = [item["type"] for item in body["input"]].count("function_call")
        self.asked[name, turn] += 1
        if self.is_holding and turn == HELD:
            await asyncio.Event().wait()  # until the client is killed
        command = dict(enumerate(self.scripts[name])).get(turn)
        tool, argument = ("Bash", "command") if is_anthropic else ("exec_command", "cmd")
        called = [] if command is None else [ToolCallData(uuid.uuid4().hex, tool, json.dumps({argument: command}))]
        reason = "tool_calls" if called else "stop"
        response = LLMResponse(
            [TextData("I work."), *called], usage=Usage(900, 50), model=body["model"], finish_reason=reason
        )
        wire: Any = anthropic_messages if is_anthropic else openai_responses
        return web.json_response(wire.response_to_body(response))

    async def _other(self, request: web.Request) -> web.StreamResponse:
        if not request.path.startswith("/git/"):
            return await super()._other(request)
        content = await request.read()
        env = {
            **os.environ,
            "GIT_PROJECT_ROOT": str(self.repositories),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": request.headers.get("Git-Protocol", ""),
            "PATH_INFO": request.path.removeprefix("/git"),
            "QUERY_STRING": request.query_string,
            "REQUEST_METHOD": request.method,
            "CONTENT_TYPE": request.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(content)),
        }
        command = ["git", "http-backend"]
        done = await asyncio.to_thread(subprocess.run, command, input=content, env=env, capture_output=True, timeout=60)
        head, _, written = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().splitlines())
        return web.Response(body=written, status=int(headers.pop("Status", "200")[:3]), headers=headers)


@pytest.fixture
def tag(engine: docker.DockerClient) -> Iterator[Callable[[str, str], None]]:
    """Gives an image of the engine a published name until the end of the test."""
    tagged: list[str] = []

    def tag(image: str, name: str) -> None:
        engine.images.get(image).tag(name)
        tagged.append(name)

    yield tag
    for name in tagged:
        engine.api.remove_image(name, force=True)


@pytest.fixture
def names(tag: Callable[[str, str], None]) -> list[str]:
    names = [f"task-{uuid.uuid4().hex[:8]}" for _ in range(3)]
    for name in names:
        tag("debian:bookworm-slim", f"alexgshaw/{name}:20251031")
    return names


@pytest.fixture
def problem(tag: Callable[[str, str], None], swebench_image: str, tmp_path: Path) -> str:
    """The id of the only row of SWE-bench Verified, whose image has its published name on the engine."""
    instance = f"demo__calc-{uuid.uuid4().hex[:8]}"
    tag(swebench_image, f"swebench/sweb.eval.x86_64.{instance.replace('__', '_1776_')}:latest")
    repository, folder = tmp_path / "repositories" / REPO, tmp_path / "SWE-bench" / "SWE-bench_Verified"
    folder.mkdir(parents=True)  # the library of the hub takes it for the data set
    write_rows(folder / "test.jsonl", make_row(repository, git(repository, "rev-parse", "main~1").strip(), instance))
    return instance


@pytest.fixture
def services(tmp_path: Path, names: list[str]) -> Iterator[Services]:
    tasks, harbor = Repository(tmp_path / "git" / "tasks"), Repository(tmp_path / "git" / "harbor")
    for name in names:
        files = {"task.toml": TASK_TOML, "instruction.md": "Write `done` to /srv/{name}.txt.\n", "tests/test.sh": TEST}
        tasks.write({f"{name}/{file}": text.format(name=name) for file, text in files.items()})
    commit = tasks.commit()
    listed = [{"name": name, "git_url": TASKS_AT, "git_commit_id": commit, "path": name} for name in names]
    row = {"name": "terminal-bench", "version": "2.0", "description": "Tasks of a terminal.", "tasks": listed}
    harbor.write({"registry.json": json.dumps([row])})
    harbor.commit()
    scripts = {f"/srv/{name}.txt": [turn.format(name=name) for turn in TURNS] for name in names}
    with Services(tmp_path / "git", {**scripts, "add(2, 3) is -1": FIX}) as services:
        yield services


@pytest.mark.timeout(900)
def test_first_commands_run_resume_and_branch(
    cli: Cli, tmp_path: Path, names: list[str], problem: str, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_harness_on_path(tmp_path / "packages", monkeypatch)
    (tmp_path / "cache" / "ares_exp").mkdir(parents=True)
    (tmp_path / "cache" / "ares_exp" / "agents").symlink_to(AgentStore().folder)
    root = services.url.removesuffix("/v1")
    env = {
        **mirror(HARBOR_REPOSITORY, f"{root}/git/harbor", TASKS_AT, f"{root}/git/tasks"),
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": "key-of-anthropic",
        "OPENAI_BASE_URL": services.url,
        "OPENAI_API_KEY": "key-of-openai",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hub"),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    texts = [f"/srv/{name}.txt" for name in names]
    command = [sys.executable, "-m", "ares_exp", *TERMINAL_BENCH]
    with subprocess.Popen(
        command, cwd=tmp_path, env={**SECRET_FREE, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as killed:
        is_held = wait_until(lambda: all(services.asked[text, HELD] for text in texts), 120)
        killed.kill()
        _, told = killed.communicate(timeout=60)
    assert is_held, told
    assert f"Fetching 3 tasks of {TASKS_AT}" in told
    assert "is the old name of" not in told  # not a mistake of this user
    services.is_holding = False

    resumed = cli("resume=latest", env=env)
    assert resumed.returncode == 0, resumed.stderr
    once = {(text, turn): 1 for text in texts for turn in range(len(TURNS) + 1)}
    assert services.asked == {**once, **{(text, HELD): 2 for text in texts}}

    branched = cli(f"branch_from=latest/{names[1]}@2", "branches=2", env=env)
    assert branched.returncode == 0, branched.stderr
    again = {(texts[1], turn): 3 for turn in range(2, len(TURNS) + 1)}
    assert services.asked == {**once, **{(text, HELD): 2 for text in texts}, **again}

    solved = cli(*SWE_BENCH, env=env)
    assert solved.returncode == 0, solved.stderr
    runs = sorted((tmp_path / "outputs" / "default").iterdir())
    rows = [json.loads((run / "episodes.jsonl").read_text().splitlines()[-1]) for run in runs]
    assert [(row["reward"], row["outcome"]) for row in rows] == [(1.0, "completed")] * 3
    assert rows[-1]["task_name"] == problem

    sent = {one.path: one for one in services.requests}
    assert sent["/v1/messages"].headers["x-api-key"] == "key-of-anthropic"
    assert sent["/v1/messages"].headers["anthropic-version"] == "2023-06-01"
    assert sent["/v1/responses"].headers["authorization"] == "Bearer key-of-openai"
    assert sent["/v1/responses"].body["model"] == "gpt-5.5"
