import asyncio
import json
import re
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.agents.installed.command import CommandAgentFactory
from ares_exp.agents.installed.installed_agent import mcp_json
from ares_exp.agents.toolbox.package import user_package
from ares_exp.agents.toolbox.package_store import Installed
from ares_exp.commands.cli.main import run_word
from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.errors import SnapshotUnsupportedError, UserError
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import EpisodeResult, Outcome
from ares_exp.snapshots.snapshot import EnvironmentSnapshot
from ares_exp.tasks.task_toml import McpServer
from ares_exp.training.sampled_calls import conversations_of
from ares_exp.trajectories import load
from ares_exp.trajectories.exports.atif_writer import to_atif
from ares_exp.trajectories.exports.preference_export import preference_rows
from ares_exp.trajectories.exports.sft_export import sft_rows
from ares_exp.trajectories.records import serialize_llm_response
from tests.installed_agents import equipped_task
from tests.leaks import processes

trajectories = partial(run_word, program="ares-exp")

pytestmark = [pytest.mark.local, pytest.mark.usefixtures("here")]

AGENT = Path(__file__).parents[2] / "data" / "agents" / "chat_agent.py"
TASK = ("env=harbor", "env.tasks=write-greeting", "tracker=none")
COMMAND = ("agent=command", "agent.command='python3 /opt/agent.py'", f"agent.files={{/opt/agent.py: {AGENT}}}")
GREET = "echo Hello, harbor! > /app/greeting.txt"


def replies(*texts: str) -> tuple[str, str]:
    return "policy=scripted", f"policy.replies={json.dumps(list(texts))}"


def execute(*words: str, command: tuple[str, ...] = COMMAND) -> EpisodeResult:
    overrides = [*TASK, "container=local", *command, "hydra.run.dir=run", *words]
    [row] = ares_exp.run(overrides, quiet=True).rows
    return row


def kept(name: str) -> str:
    [path] = Path("run/files").glob(f"*/agent/{name}")
    return path.read_text()


def asked() -> list[dict[str, Any]]:
    [stored] = load(Path("run"))
    return [dict(step.observation) for step in stored.load().steps if step.observation is not None]


def test_oracle_warns_that_program_is_not_run(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match=r"`agent\.files` to name text files, got missing\.py"):
        execute("policy=oracle", "agent.files={/opt/agent.py: missing.py}")
    assert execute("policy=oracle").reward == 1.0
    assert "agent=command is checked, but does not run. To run it, choose another policy" in caplog.text


def test_program_solves_a_task_without_a_network() -> None:
    probe = "env; cat /proc/net/dev; echo kept > $ARES_AGENT_DIR/note.txt"
    row = execute(*replies(probe, GREET, "DONE"))
    assert (row.outcome, row.reward, row.num_steps) == (Outcome.COMPLETED, 1.0, 3)
    assert (row.agent.name, row.agent.requests, row.agent.retries, row.agent.conversations) == (
        "command",
        3,
        0,
        ("main",),
    )
    assert row.agent.version is not None
    assert re.fullmatch(r"sha256:[0-9a-f]{16}", row.agent.version)
    requests = asked()
    assert [len(request["messages"]) for request in requests] == [1, 3, 5]
    assert requests[0]["origin"] == {"wire": "chat_completions", "model": "policy"}
    assert "greeting.txt" in requests[0]["messages"][0]["content"]
    shown = requests[1]["messages"][2]["content"]
    assert "ARES_LLM_URL=http://127.0.0.1:61081\n" in shown
    assert [line.split(":")[0].strip() for line in shown.splitlines() if ":" in line and "lo:" in line] == ["lo"]
    assert "eth0" not in shown
    assert "ARES_LLM_KEY=***\n" in shown
    assert kept("note.txt") == "kept\n"
    assert GREET in kept("output.txt")
    written = [path.read_bytes() for path in Path("run").rglob("*") if path.is_file()]
    assert not any(b"ares-key-" in data for data in written)


SIDE = ("TITLE a greeting", "Greetings", GREET, "DONE")


@pytest.mark.slow
def test_background_requests_are_observed_or_answered(capsys: pytest.CaptureFixture[str]) -> None:
    row = execute(*replies(*SIDE))
    assert (row.reward, row.num_steps) == (1.0, 4)
    assert (row.agent.requests, row.agent.background_requests) == (4, 0)
    observed = asked()
    Path("run").rename("observed")
    again = execute(*replies(*SIDE), "agent.background_requests=answer")
    Path("run").rename("background_request")
    assert (again.reward, again.num_steps) == (1.0, 3)
    assert (again.prompt_tokens, again.generated_tokens) == (row.prompt_tokens, row.generated_tokens), "it is counted"
    assert (again.agent.requests, again.agent.background_requests, again.agent.conversations) == (
        4,
        1,
        row.agent.conversations,
    )
    [stored] = load(Path("background_request"))
    episode = stored.load()
    steps = [step.observation for step in episode.steps if step.observation is not None]
    assert [step["messages"] for step in steps] == [one["messages"] for one in observed if one is not observed[1]]
    [background_request] = [
        background_request for step in episode.steps for background_request in step.background_requests
    ]
    assert background_request in episode.steps[1].background_requests
    assert background_request.request["messages"] == observed[1]["messages"]
    assert background_request.request["origin"] == {**observed[1]["origin"], "is_background": True}
    assert background_request.response["data"][0]["content"] == "Greetings"
    assert conversations_of(episode) == ["main", row.agent.conversations[1], "main", "main"], (
        "trained on where its conversation is asked for"
    )
    records = [step["extra"]["ares_exp"]["record"] for step in to_atif(episode)[0]["steps"] if "extra" in step]
    assert [one["response"]["data"] for record in records for one in record.get("background_requests", ())] == [
        [{"content": "Greetings"}]
    ]
    assert trajectories(["show", "background_request"]) == 0
    shown = capsys.readouterr().out
    assert f"background request {row.agent.conversations[1]}: A title for: a greeting" in shown
    assert "Greetings" in shown

    [replayed] = ares_exp.run(["replay=background_request", "tracker=none", "hydra.run.dir=again"], quiet=True).rows
    assert (replayed.outcome, replayed.reward, replayed.num_steps) == (Outcome.COMPLETED, 1.0, 3)
    assert replayed.agent.background_requests == 1


@pytest.mark.parametrize("mode", ["observe", "answer"])
def test_first_title_is_not_the_main_conversation(mode: str) -> None:
    bodies = AGENT.parents[2] / "fixtures" / "agent_bodies" / "claude_agent_sdk.json"
    files = f"agent.files={{/opt/agent.py: {AGENT.with_name('recorded_agent.py')}, /opt/bodies.json: {bodies}}}"
    command = ("agent=command", "agent.command='python3 /opt/agent.py /opt/bodies.json'", files)
    row = execute(*replies("A title", "work", "end"), f"agent.background_requests={mode}", command=command)
    assert row.agent is not None
    assert (row.num_steps, row.agent.background_requests) == ((3, 0) if mode == "observe" else (2, 1))
    [episode] = load(Path("run")).trajectories()
    conversations = conversations_of(episode)
    assert (conversations[0][:5], conversations[1:]) == ("side-", ["main", "main"])
    assert conversations == [row.agent.conversations[0], "main", "main"]
    sft, _ = sft_rows([episode])
    assert "work" in [one["messages"][-1]["content"] for one in sft if one["conversation"] == "main"]
    *steps, last = episode.steps
    better = replace(last, action=serialize_llm_response(LLMResponse.from_text("better")))
    other = replace(episode, episode_id="other", steps=(*steps, better), total_reward=1.0)
    [pair] = preference_rows([episode, other])[0]
    assert (pair["conversation"], pair["chosen"][0]["content"], len(pair["prompt"])) == ("main", "better", 5)


def test_program_without_tools_has_a_main_conversation() -> None:
    command = (COMMAND[0], "agent.command='python3 /opt/agent.py --text'", COMMAND[2])
    row = execute(*replies(GREET, "DONE"), command=command)
    [episode] = load(Path("run")).trajectories()
    assert row.agent is not None
    assert (conversations_of(episode), row.agent.conversations) == (["main", "main"], ("main",))
    ares_exp.run(["replay=run", "tracker=none", "hydra.run.dir=again", "policy.strict=false"], quiet=True)
    [again] = json.loads(Path("again/replay.json").read_text())["episodes"]
    assert [step["match"] for step in again["steps"]] == ["different", "exact"], "and not extra requests"
    Path("run").rename("whole")
    execute("limits.steps=1", *replies(GREET), command=command)
    [cut] = load(Path("run")).trajectories()
    assert conversations_of(cut)[0].startswith("side-"), "it may have been a title"
    Path("run").rename("cut")
    answered = execute(*replies(GREET, "DONE"), "agent.background_requests=answer", command=command)
    assert answered.error is not None
    assert (answered.error.type, "background_requests=observe" in answered.error.message) == ("NoRequestError", True)


def test_failed_background_request_is_a_policy_error() -> None:
    row = execute(*replies("TITLE a greeting"), "agent.background_requests=answer")
    assert (row.outcome, row.num_steps) == (Outcome.POLICY_ERROR, 1)
    assert row.error is not None
    assert "the agent requests another one (request 2)" in row.error.message


@pytest.mark.slow
def test_replay_ignores_normalised_differences() -> None:
    draw = "echo job $(od -An -N4 -tu4 /dev/urandom)"
    execute(*replies(draw, GREET, "DONE"), "agent.normalise=[{pattern: 'job +[0-9]+', replacement: job}]")
    ares_exp.run(["replay=run", "tracker=none", "hydra.run.dir=again", "policy.strict=normalised"], quiet=True)
    report = json.loads(Path("again/replay.json").read_text())
    [episode] = report["episodes"]
    assert [step["match"] for step in episode["steps"]] == ["exact", "normalised", "exact"]
    assert report["normalisers"][-1] == "job +[0-9]+"
    ares_exp.run(["replay=run", "tracker=none", "hydra.run.dir=raw", "policy.normalise=[]"], quiet=True)
    [episode] = json.loads(Path("raw/replay.json").read_text())["episodes"]
    assert [step["match"] for step in episode["steps"]] == ["exact", "different", "exact"]


@pytest.mark.slow
def test_branches_rerun_in_separate_containers() -> None:
    draw = "od -An -N8 -tu8 /dev/urandom > /tmp/drawn; cat /tmp/drawn"
    execute(*replies("PARTS one|two", "DONE", "DONE", draw, "DONE"))
    branch = ["branch_from=run/write-greeting@4", "branches=2", "tracker=none", "hydra.run.dir=branches"]
    branch += [f"policy.replies={json.dumps(['cat /tmp/drawn', 'DONE'])}", f"branch.response={json.dumps(GREET)}"]
    results = ares_exp.run([*branch, "snapshot=none"], quiet=True)
    assert [(row.outcome, row.reward, row.num_steps) for row in results.rows] == [(Outcome.COMPLETED, 1.0, 3)] * 2
    [recorded] = load(Path("run")).trajectories()
    drawn = []
    for episode in load(Path("branches")).trajectories():
        lineage = episode.metadata["lineage"]
        assert (lineage["root"], lineage["parent"], lineage["step"]) == (recorded.episode_id,) * 2 + (4,)
        assert [step.step_type for step in episode.steps] == ["FIRST"] + ["MID"] * 6 + ["LAST"]
        assert [step.action for step in episode.steps[:5]] == [step.action for step in recorded.steps[:5]]
        pending, shown = (episode.steps[number].observation for number in (4, 6))
        assert shown is not None
        drawn.append(pending["messages"][-1]["content"])
        assert shown["messages"][-1]["content"] == drawn[-1], "the file of its own is there"
    assert len({*drawn}) == 2, "each has run by itself"
    differs = "The replay up to step 4 differs from the recorded episode in 1 request, from step 4 on."
    assert Path("branches/run.log").read_text().count(differs) == 1


@pytest.mark.slow
def test_early_end_of_a_branch_is_explained() -> None:
    execute(*replies("true", GREET, "DONE"))
    [path] = Path("run").glob("trajectories/**/*.json")
    path.write_text(path.read_text().replace(GREET, "DONE"))  # then the agent ends there
    branch = ["branch_from=run/write-greeting@2", "tracker=none", "hydra.run.dir=b"]
    results = ares_exp.run(branch, quiet=True)
    assert results.exit_code == 1
    [row] = results.rows
    assert row.error.type == "DivergenceError"
    assert "did not reach step 2: at step 2 the episode ended" in row.error.message


@pytest.mark.slow
def test_failed_episode_has_a_snapshot_for_inspection() -> None:
    with pytest.raises(UserError, match=r"Expected `snapshot=on_failure`, `manual` or `none` with agent=command"):
        execute("snapshot=every_step", *replies("DONE"))
    assert execute("snapshot=on_failure", *replies("echo left > /app/mine.txt", "DONE")).reward == 0.0
    [path] = Path("run/snapshots").glob("write-greeting*")
    snapshot = EnvironmentSnapshot.load_from_file(path)
    assert (snapshot.step_count, snapshot.is_restorable) == (1, False)
    assert "/app/mine.txt" in get_delta(snapshot.object_store, snapshot.filesystem).entries
    assert "no episode can continue from this snapshot" in str(snapshot.container["not_captured"])
    with pytest.raises(SnapshotUnsupportedError, match="branch_from="):
        asyncio.run(CodeEnvironment.load_from_state(path, code_agent_factory=CommandAgentFactory(command="x")))
    branch = ["branch_from=run/write-greeting@1", "tracker=none", "hydra.run.dir=b", "snapshot=none"]
    [row] = ares_exp.run([*branch, f"policy.replies={json.dumps([GREET, 'DONE'])}"], quiet=True).rows
    assert row.reward == 1.0, "run again, and not from the snapshot"


def test_failed_program_is_scored() -> None:
    row = execute(*replies(GREET, "EXIT 3"))
    assert (row.outcome, row.reward, row.limit) == (Outcome.TRUNCATED, 1.0, "agent_exit")
    assert row.error.type == "AgentExitError"
    assert "exit code 3" in row.error.message
    assert "EXIT 3" in row.error.message
    [stored] = load(Path("run"))
    assert stored.load().error == row.error


def test_large_files_of_the_program_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    large = "mkdir $ARES_AGENT_DIR/d; { echo first; head -c 20000000 /dev/zero; echo last; } >$ARES_AGENT_DIR/d/large"
    row = execute(*replies(large, GREET, "DONE"))
    assert row.reward == 1.0
    [path] = Path("run/files").glob("*/agent/d/large")
    content = path.read_bytes()
    assert (content[:6], content[-5:], len(content)) == (b"first\n", b"last\n", 2**23 + len("\n[cut by ares_exp]\n"))
    assert "DONE" in kept("output.txt")
    assert "larger than 16 MiB were shortened in the copy: ./d/large" in caplog.text


def test_accepted_exit_codes_count_as_success() -> None:
    row = execute("agent.ok_exit_codes=[0,3]", *replies(GREET, "EXIT 3"))
    assert (row.outcome, row.reward) == (Outcome.COMPLETED, 1.0)


def test_program_without_a_request_is_explained() -> None:
    row = execute(*replies("DONE"), command=("agent=command", "agent.command='echo I know nothing of it; exit 2'"))
    assert (row.outcome, row.reward) == (Outcome.AGENT_ERROR, None)
    assert row.error.type == "NoRequestError"
    for part in ("exit code 2", "ARES_LLM_URL", "I know nothing of it"):
        assert part in row.error.message
    assert kept("output.txt") == "I know nothing of it\n"


def test_rejected_requests_are_in_the_row() -> None:
    command = (COMMAND[0], "agent.command='ARES_LLM_KEY=wrong python3 /opt/agent.py'", COMMAND[2])
    row = execute(*replies("DONE"), command=command)
    assert row.agent is not None
    assert row.error is not None
    assert (row.error.type, row.agent.requests, row.agent.refused) == ("NoRequestError", 0, 1)
    assert row.agent.last_refusal is not None
    assert row.agent.last_refusal.startswith("POST /v1/chat/completions: 401, Expected the key in the")
    assert row.agent.last_refusal in row.error.message
    assert row.agent.last_refusal in Path("run/run.log").read_text()
    [line] = Path("run/episodes.jsonl").read_text().splitlines()
    assert json.loads(line)["agent"]["last_refusal"] == row.agent.last_refusal


@pytest.mark.parametrize(
    ("limit", "name", "then"), [("limits.steps=1", "steps", "true"), ("timeouts.agent=2", "time", "wait")]
)
def test_limit_stops_the_program_and_scores_it(limit: str, name: str, then: str) -> None:
    sleep = f"sleep 61.{uuid.uuid4().int % 10**12:012}"  # the two cases may run at the same time
    row = execute(limit, *replies(f"{GREET}; {sleep} >/dev/null 2>&1 & {then}", "true"))
    assert (row.outcome, row.reward, row.limit) == (Outcome.TRUNCATED, 1.0, name)
    assert not [words for _, _, _, words in processes() if sleep in words]


async def test_version_is_the_digest_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    versions = []
    for text in ("a", "b", "a"):
        (tmp_path / "file").write_text(text)
        (tmp_path / "mine" / "x").write_text(text)
        for options in ({"files": {"/x": tmp_path / "file"}}, {"mount": tmp_path / "mine"}):
            factory = CommandAgentFactory(command="./x", **options)  # type: ignore[arg-type]
            await factory.preflight()
            versions.append(factory.version)
    assert versions[:2] == versions[4:]
    assert len({*versions[:4]}) == 4
    factory = CommandAgentFactory(command="./x")
    await factory.preflight()
    assert factory.version is None


def test_mounted_files_and_variables_reach_the_program(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "agent.py").write_text(AGENT.read_text())
    command = (
        "agent=command",
        "agent.command='python3 $ARES_AGENT_MOUNT/agent.py'",
        f"agent.mount={tmp_path / 'mine'}",
        "agent.env={OPENAI_BASE_URL: $ARES_LLM_URL/v1, PLAIN: $HOME}",
        "agent.name=mine",
    )
    row = execute(*replies("env; touch $ARES_AGENT_MOUNT/x; true", GREET, "DONE"), command=command)
    assert row.reward == 1.0
    assert row.agent.name == "mine"
    shown = asked()[1]["messages"][2]["content"]
    assert "OPENAI_BASE_URL=http://127.0.0.1:61081/v1" in shown
    assert "PLAIN=$HOME" in shown
    assert "Read-only file system" in shown


def test_inline_files_have_values_mode_and_context(tmp_path: Path) -> None:
    (tmp_path / "url.txt").write_text("$ARES_LLM_URL")
    files = {
        "/opt/agent.py": str(AGENT),
        "~/models.json": {"text": "$ARES_LLM_KEY $ARES_MODEL $HOME", "fill": True, "mode": "600"},
        "/opt/plain.txt": {"text": "$ARES_LLM_KEY"},
        "/opt/url.txt": {"path": "url.txt", "fill": True},
    }
    option = {
        "_target_": "ares_exp.agents.installed.command.CommandAgentFactory",
        "command": "python3 /opt/agent.py",
        "files": files,
        "env": {"SERVERS": "$ARES_MCP_FILE", "SKILLS": "$ARES_SKILLS"},
        "model_name": "m",
    }
    (tmp_path / "options/agent").mkdir(parents=True)
    (tmp_path / "options/agent/mine.yaml").write_text(json.dumps(option))
    show = "grep -F \"$ARES_LLM_KEY m \" ~/models.json | grep -qF 'm $HOME' && stat -c %a ~/models.json"
    look = f"{show}; cat /opt/plain.txt /opt/url.txt $SERVERS; ls $SKILLS; true"
    words = [*equipped_task(tmp_path / "tasks"), *TASK[1:], "container=local", "hydra.run.dir=run"]
    [row] = ares_exp.run(
        [*words, "agent=mine", *replies(look, GREET, "DONE")], config_dirs=["options"], quiet=True
    ).rows
    assert row.reward == 1.0
    shown = asked()[1]["messages"][2]["content"]
    assert shown.startswith("exit code 0\n600\n$ARES_LLM_KEYhttp://127.0.0.1:61081{"), shown
    assert '"command": "python3"' in shown
    assert "greets-in-verse" in shown
    assert not any(b"ares-key-" in path.read_bytes() for path in Path("run").rglob("*") if path.is_file())
    Path("run").rename("done")
    with pytest.raises(UserError, match=r"\$ARES_MCP_FILE and \$ARES_SKILLS"):
        execute(*words[:2], *replies("DONE"))


@pytest.mark.parametrize(("transport", "kind"), [("streamable-http", "http"), ("sse", "sse")])
def test_remote_servers_are_in_the_mcp_file(transport: Any, kind: str) -> None:
    server = McpServer(name="web", transport=transport, url="http://web/mcp", headers={"X-A": "a"})
    assert json.loads(mcp_json([server])) == {
        "mcpServers": {"web": {"type": kind, "url": "http://web/mcp", "headers": {"X-A": "a"}}}
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["agent.files={/x: {text: a, path: b}}"], "either `text` or `path`"),
        ([f"agent.files={{/x: {{text: {'a' * 100_001}, fill: true}}}}"], "has 100001 bytes, .* the limit is 100000"),
        (["agent.files={/x: missing.py}"], "missing.py"),
        (["agent.files={x: missing.py}"], "start with `/` or `~/`"),
        (["agent.mount=nowhere"], "nowhere"),
        (["agent.command='echo ${NAME}'"], r"Use `\$NAME` for a shell variable"),
        (["agent.keepalive_sec=0"], "keepalive_sec"),
        (["snapshot=every_step"], "resume="),
    ],
)
def test_mistakes_are_refused_before_the_start(words: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        execute(*words, *replies("DONE"), command=("agent=command", "agent.command=./x"))


def test_missing_forwarded_ports_are_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalContainerFactory, "forwards_ports", False)
    with pytest.raises(
        UserError, match=r"agent=command .* need a forwarded port, but container=local .*forwards_ports = True"
    ):
        execute(*replies("DONE"))
    assert not Path("run/episodes.jsonl").exists()
    assert execute("policy=oracle").reward == 1.0, "the oracle runs without the program"


async def test_repeated_preflight_keeps_version_and_mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def packed(name: str) -> Installed:
        await asyncio.sleep(0)
        return Installed(user_package(name).builds[0], tmp_path, "1", "sha256:0", 0, (), (), 0.0)

    monkeypatch.setattr("ares_exp.agents.installed.command.ready_pack", packed)
    factory = CommandAgentFactory(command="pi", package="pi")
    await asyncio.gather(factory.preflight(), factory.preflight())
    assert (factory.version, len(factory.mounts)) == ("pi 1 sha256:0", 1)
