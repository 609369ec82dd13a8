"""The real agents, unmodified, solve a bundled task by a script, in containers without a network.

Each is run once, on one backend; `tests/soak/installed_agents.py` has all of both.
"""

import json
from pathlib import Path

import pytest
from aiohttp import web

import ares_exp
from ares_exp.agents.toolbox.package import PACKAGES
from ares_exp.agents.toolbox.package_store import AgentStore
from ares_exp.trajectories import load
from tests.installed_agents import SCRIPTS, SOLVE, call, check_solved, equipped_task, execute, local_python
from tests.loopback_endpoint import LoopbackEndpoint, Received, completion

pytestmark = pytest.mark.once

LOCAL = pytest.mark.local
DOCKER = pytest.mark.docker
OTHERS = ("codex", "opencode", "qwen_code")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("agent", "container"),
    [
        pytest.param("claude_code", "local", marks=[LOCAL, pytest.mark.npm("claude_code")]),
        pytest.param("codex", "docker", marks=[DOCKER, pytest.mark.npm("codex")]),
        pytest.param("opencode", "docker", marks=[DOCKER, pytest.mark.npm("opencode"), pytest.mark.nightly]),
        pytest.param("qwen_code", "local", marks=[LOCAL, pytest.mark.npm("qwen_code"), pytest.mark.nightly]),
        pytest.param("mini_swe_agent", "local", marks=[LOCAL, pytest.mark.npm("mini_swe_agent")]),
        *(
            pytest.param(name, "docker", marks=[DOCKER, pytest.mark.npm(name), pytest.mark.nightly])
            for name in ("pi", "copilot", "kimi_code", "openhands", "claude_agent_sdk")
        ),
    ],
)
def test_agent_solves_a_task_without_a_network(agent: str, container: str) -> None:
    more = [f"agent.pythons=['{local_python()}']"] if agent == "mini_swe_agent" else []
    check_solved("run", execute("run", agent, container, *more))


@LOCAL
@pytest.mark.parametrize(
    ("agent", "transport"),
    [
        pytest.param("claude_code", "stdio", marks=pytest.mark.npm("claude_code")),
        *(pytest.param(name, "stdio", marks=[pytest.mark.npm(name), pytest.mark.nightly]) for name in OTHERS),
        *(
            pytest.param(name, "streamable-http", marks=[pytest.mark.npm(name), pytest.mark.nightly])
            for name in ("claude_code", *OTHERS)
        ),
    ],
)
def test_mcp_servers_and_skills_reach_the_agent(agent: str, transport: str) -> None:
    task = equipped_task(Path("tasks"), transport)
    name = "counter_add" if agent == "opencode" else "mcp__counter__add"
    execute("run", agent, "local", *task, replies=[call(name, by=7), *SCRIPTS[agent]])
    [row] = [json.loads(line) for line in Path("run/episodes.jsonl").read_text().splitlines()]
    assert (row["reward"], row["num_steps"]) == (1.0, 3), row
    first, second = (step.observation for step in load(Path("run"))[0].load().steps[:2])
    assert "greets-in-verse" in json.dumps(first)
    assert "7 units" in json.dumps(second)


@pytest.mark.nightly
@pytest.mark.npm("gemini_cli")
@pytest.mark.parametrize("container", [pytest.param("local", marks=LOCAL), pytest.param("docker", marks=DOCKER)])
def test_gemini_cli_solves_a_task(container: str) -> None:
    results = execute("run", "gemini_cli", container, "agent.keepalive_sec=0.5", delay_sec=2.0)
    episode = check_solved("run", results)
    assert {step.observation["origin"]["wire"] for step in episode.steps if step.observation} == {"generate_content"}


@DOCKER
@pytest.mark.npm("mini_swe_agent")
def test_image_without_python_is_refused_by_name() -> None:
    results = execute("run", "mini_swe_agent", "docker")
    [row] = [json.loads(line) for line in Path("run/episodes.jsonl").read_text().splitlines()]
    assert results.exit_code == 1
    assert row["outcome"] == "agent_error"
    assert "this container has no Python. Choose an image with one of these versions" in row["error"]["message"]
    assert row["num_steps"] == 0


@pytest.mark.nightly
@LOCAL
@pytest.mark.npm("codex")
def test_subagents_of_codex_are_replayed() -> None:
    async def respond(_: web.Request, received: Received) -> web.StreamResponse:
        messages = received.body["messages"]
        is_child = "newly spawned child agent" in json.dumps(messages)  # it inherits the first call
        then = ("exec_command", {"cmd": SOLVE}) if is_child else ("collaboration__wait_agent", {"timeout_ms": 300_000})
        calls = [("collaboration__spawn_agent", {"task_name": "helper", "message": "Write it."}), then]
        turn = sum(message["role"] == "assistant" for message in messages)
        if turn == len(calls):
            return web.json_response(completion("All done."))
        assert not is_child or "Write it." in str(messages[-1])
        name, arguments = calls[turn]
        function = {"name": name, "arguments": json.dumps(arguments)}
        called = [{"id": f"c{turn}", "type": "function", "function": function}]
        return web.json_response(completion(None, tool_calls=called))

    with LoopbackEndpoint(otherwise=respond) as endpoint:
        words = ["env.tasks=[write-greeting]", "container=local", "tracker=none", "hydra.run.dir=run"]
        model = ["policy=openai", "policy.model=m", f"policy.base_url={endpoint.url}", "policy.api_key_env=null"]
        [row] = ares_exp.run([*words, *model, "agent=codex", "agent.subagents=true"], quiet=True).rows
    assert (row.reward, row.num_steps) == (1.0, 5)
    again = ["replay=run", "policy.strict=normalised", "tracker=none", "hydra.run.dir=again"]
    [replayed] = ares_exp.run(again, quiet=True).rows
    assert (replayed.reward, replayed.num_steps, replayed.agent) == (1.0, 5, row.agent)


@pytest.mark.nightly
@LOCAL
@pytest.mark.npm("codex")
def test_keepalives_let_codex_outlast_a_slow_policy() -> None:
    """Its limit is on events of a stream, and it may not ask twice here."""
    impatient = ["agent.idle_timeout_ms=2000", "agent.extra_args=['-c','model_providers.ares.stream_max_retries=0']"]
    kept = execute("kept", "codex", "local", *impatient, "agent.keepalive_sec=0.5", delay_sec=4.0)
    check_solved("kept", kept)
    lost = execute("lost", "codex", "local", *impatient, "agent.keepalive_sec=60", delay_sec=4.0)
    assert lost.mean_reward == 0.0  # what it left is scored
    [row] = [json.loads(line) for line in Path("lost/episodes.jsonl").read_text().splitlines()]
    assert row["error"]["type"] == "AgentExitError"
    assert "idle timeout waiting for SSE" in row["error"]["message"]


@LOCAL
@pytest.mark.npm("claude_code")
def test_container_hides_the_cache_except_the_agent() -> None:
    """Agents bypass their own permissions: the container has to hold them."""
    folder = AgentStore().folder
    (build, *_) = PACKAGES["claude_code"].for_machine()
    look = f"ls {folder} ~/.cache 2>&1; ls {build.target}; touch {build.target}/new 2>&1; ls -d {Path.cwd()} 2>&1"
    replies = [
        {"text": "", "tool_calls": [{"name": "Bash", "arguments": {"command": look, "description": "looks"}}]},
        ".",
    ]
    execute("run", "claude_code", "local", replies=replies)
    [kept] = Path("run/files").glob("*/agent/output.txt")
    [said] = [
        block["content"]
        for line in kept.read_text().splitlines()
        if line.startswith('{"type":"user"')
        for block in json.loads(line)["message"]["content"]
    ]
    assert said.count("No such file or directory") == 3, said
    assert "Read-only file system" in said
    assert "claude" in said.splitlines()
