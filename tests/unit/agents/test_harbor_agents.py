"""`agent=harbor`: classes with the interface of Harbor's agents run unmodified."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

import ares_exp
from ares_exp.agents.installed.harbor_agents import ApiFormat, HarborAgentFactory, HarborEnvironment
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import ConfigError, PreflightError
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.tasks.task_contract import AgentContext
from ares_exp.tasks.task_toml import McpServer
from tests import fake_harbor

CLASSES = "tests.harbor_classes"
GREET = "echo Hello, harbor! > /app/greeting.txt"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fake_harbor.use(monkeypatch)


def execute(name: str, *replies: str) -> EpisodeResult:
    words = ["env=harbor", "env.tasks=write-greeting", "tracker=none", "container=local", "policy=scripted"]
    words += ["agent=harbor", f"agent.name='{CLASSES}:{name}'", "hydra.run.dir=run"]
    [row] = ares_exp.run([*words, f"policy.replies={json.dumps(replies)}"], quiet=True).rows
    return row


@pytest.mark.local
def test_class_solves_a_task_unmodified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE_API_KEY", "a-secret-of-the-host")
    row = execute("ChatAgent", GREET, "DONE")
    assert (row.outcome, row.reward, row.num_steps) == (Outcome.COMPLETED, 1.0, 2)
    assert (row.agent.name, row.agent.version, row.agent.requests) == ("harbor-ChatAgent", "1.2.3", 2)
    [kept] = Path("run/files").glob("*/agent")
    assert (kept / "copied.txt").read_text() == "shared"
    assert {"env.txt", "copied.txt"} <= {*json.loads((kept / "trajectory.json").read_text())["files"]}
    shown = (kept / "env.txt").read_text()
    assert "ARES_MODEL=openai/policy\n" in shown
    assert "a-secret-of-the-host" not in shown
    assert not any(b"ares-key-" in path.read_bytes() for path in Path("run").rglob("*") if path.is_file())


@pytest.mark.local
@pytest.mark.parametrize(
    ("name", "replies", "error", "message"),
    [
        ("ChatAgent", ("EXIT 3",), "AgentExitError", "RuntimeError: exit code 3: EXIT 3"),
        ("SilentAgent", (), "NoRequestError", "ValueError: no program"),
    ],
)
def test_error_of_class_ends_the_episode(name: str, replies: tuple[str, ...], error: str, message: str) -> None:
    row = execute(name, *replies)
    assert row.error is not None
    assert row.error.type == error
    assert message in row.error.message


@pytest.mark.local
async def test_environment_has_the_methods_of_harbor(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "program/bin").mkdir(parents=True)
    (tmp_path / "program/bin/tool").write_text("#!/bin/sh\necho of the mount\n")
    (tmp_path / "program/bin/tool").chmod(0o755)
    (tmp_path / "program/bin/agent-python").symlink_to("tool")
    async with LocalContainerFactory()(ContainerSpec("harbor")) as box:
        environment = HarborEnvironment(box, tmp_path / "logs")
        await environment.upload_dir(tmp_path / "program", "/opt/program")
        await environment.link_programs("/opt/program", "/opt/a venv")
        assert environment.default_user is None
        for command in ("tool", "~/.local/bin/tool", ". ~/.nvm/nvm.sh; nvm use 24; tool", "'/opt/a venv/bin/python'"):
            assert (await environment.exec(command)).stdout == "of the mount\n", command
        failed = await environment.exec('pwd; echo "$NAME" >&2; exit 3', cwd="/tmp", env={"NAME": "value"}, user="root")
        assert (failed.stdout, failed.stderr, failed.return_code) == ("/tmp\n", "value\n", 3)
        assert (await environment.exec("sleep 600", timeout_sec=1)).return_code == 124
        assert [await environment.is_dir(path) for path in ("/opt/a venv", "/etc/passwd")] == [True, False]
        await environment.exec("echo kept > /tmp/result.txt")
        await environment.download_file("/tmp/result.txt", tmp_path / "result.txt")
        assert (tmp_path / "result.txt").read_text() == "kept\n"


@pytest.mark.local
async def test_cancelled_class_runs_no_more_commands(tmp_path: Path) -> None:
    async def stubborn() -> None:
        try:
            await environment.exec("touch /tmp/started; sleep 600")
        finally:
            await environment.exec("touch /tmp/cleaned")

    async with LocalContainerFactory()(ContainerSpec("harbor")) as box:
        environment = HarborEnvironment(box, tmp_path)
        task = asyncio.create_task(stubborn())
        async with asyncio.timeout(60):
            await box.exec("until test -e /tmp/started; do sleep 0.05; done")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await box.exec("test -e /tmp/cleaned")).exit_code == 1


@pytest.mark.parametrize(
    ("api_format", "model", "path"),
    [("openai_chat_completions", "openai/m", "/v1"), ("google_generate_content", "gemini/m", "")],
)
def test_class_gets_skills_servers_and_its_options(
    tmp_path: Path, api_format: ApiFormat, model: str, path: str
) -> None:
    factory = HarborAgentFactory(name=f"{CLASSES}:ChatAgent", model_name="m", api_format=api_format, env={"A": "b"})
    context = AgentContext(skills_dir="/skills", mcp_servers=(McpServer(name="docs", url="http://docs:1/mcp"),))
    agent = factory.create(tmp_path, "http://127.0.0.1:1", "key", context)
    assert (agent.skills_dir, agent.mcp_servers[0].name, agent.mcp_servers[0].url) == (
        "/skills",
        "docs",
        "http://docs:1/mcp",
    )
    assert (agent.model_name, agent.model_connection.execution_base_url) == (model, f"http://127.0.0.1:1{path}")
    assert (agent.model_connection.api_key, agent.extra_env["A"]) == ("key", "b")
    assert factory.supports == {"mcp_servers", "skills_dir"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("codexx", "Expected `agent.name` to be an agent of Harbor, got `codexx`"),
        (f"{CLASSES}:NoUrlAgent", "NoUrlAgent` has no option for the URL of its LLM"),
        (f"{CLASSES}:BedrockAgent", r"only the LLM APIs \['bedrock_converse'\]\. Use an agent for openai_chat_"),
    ],
)
def test_unsupported_classes_are_rejected(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HarborAgentFactory(name=name)


async def test_options_that_class_rejects_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"PickyAgent` rejects the options in .*Unknown option 'colour'"):
        await HarborAgentFactory(name=f"{CLASSES}:PickyAgent").preflight()


def test_missing_harbor_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "harbor.agents.factory", None)
    with pytest.raises(PreflightError, match=r"needs Harbor and Python 3\.12 or newer.*ares-exp\[harbor\]"):
        HarborAgentFactory(name="codex")
