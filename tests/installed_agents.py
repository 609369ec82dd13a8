"""Whole runs of the real agents by a script, for tests and for `tests/soak`."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import ares_exp
from ares_exp.runs.from_python import RunResults
from ares_exp.trajectories import load
from ares_exp.trajectories.records import EpisodeTrajectory

SOLVE = (
    "echo 'Hello, harbor!' > /app/greeting.txt; cat /app/greeting.txt;"
    " printf 'routes: '; tail -n +2 /proc/net/route | wc -l;"
    " (exec 3<>/dev/tcp/1.1.1.1/443) 2>/dev/null || echo nobody outside"
)
"""Solves the task write-greeting, and tells of the network."""
SHOWN = ("Hello, harbor!", "routes: 0", "nobody outside")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"text": "I write it.", "tool_calls": [{"name": name, "arguments": arguments}]}


DONE = "All done."
EDIT = "/app/greeting.txt\n```\n<<<<<<< SEARCH\n{}=======\nHello, harbor!\n>>>>>>> REPLACE\n```\n"
SCRIPTS: dict[str, list[Any]] = {
    "claude_code": [call("Bash", command=SOLVE, description="writes"), DONE],
    "codex": [call("exec_command", cmd=SOLVE), DONE],
    "opencode": [call("bash", command=SOLVE, description="writes"), DONE],
    "qwen_code": [call("run_shell_command", command=f"{SOLVE}; sleep 1", is_background=False), DONE],
    "pi": [call("bash", command=SOLVE), DONE],
    "copilot": [call("bash", command=SOLVE, description="writes"), DONE],
    "kimi_code": [call("Bash", command=SOLVE), DONE],
    "gemini_cli": [call("run_shell_command", command=SOLVE, description="writes"), DONE],
    "openhands": [call("terminal", command=SOLVE, security_risk="LOW", summary="writes"), DONE],
    "claude_agent_sdk": [call("Bash", command=SOLVE, description="writes"), DONE],
    "aider": [EDIT.format("Something that is missing.\n"), EDIT.format("")],
    "mini_swe_agent": [
        call("bash", command=f"bash -c {json.dumps(SOLVE)}"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ],
}
"""Replies that solve write-greeting. What a command prints right before its end, qwen-code 0.24.4 may lose."""
OPTIONS = {"aider": ["+agent.env.AIDER_EDIT_FORMAT=diff"]}  # it asks again if an edit does not fit
OF_PROVIDERS = {"WebSearch", "WebFetch", "websearch", "webfetch", "web_search", "web_fetch"}
"""Tools that reach out."""


def local_python() -> str:
    program = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or shutil.which("python3") or "python3"
    show = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([program, "-c", show], capture_output=True, text=True, check=True).stdout.strip()


SERVE = """\
python3 /srv.py plain 8123 >/dev/null 2>&1 & \
until python3 -c 'import socket; socket.create_connection(("127.0.0.1", 8123))' 2>/dev/null; do sleep 0.1; done
"""


def equipped_task(folder: Path, transport: str = "stdio") -> list[str]:
    """Makes write-greeting with an MCP server and a skill, and returns the overrides for it."""
    task = folder / "write-greeting"
    shutil.copytree(Path(ares_exp.__file__).parent / "tasks/samples/write-greeting", task)
    shutil.copy(Path(__file__).parent / "data/agents/mcp_server.py", task / "environment/srv.py")
    (task / "environment/SKILL.md").write_text("---\nname: greets-in-verse\ndescription: Rhymes.\n---\nRhyme.\n")
    with (task / "environment/Dockerfile").open("a") as dockerfile:
        dockerfile.write("COPY srv.py /srv.py\nCOPY SKILL.md /skills/greets-in-verse/SKILL.md\n")
    toml = (task / "task.toml").read_text() + 'skills_dir = "/skills"\n[[environment.mcp_servers]]\n'
    server = 'command = "python3"\nargs = ["/srv.py", "plain"]\n'
    if transport != "stdio":
        server = f'url = "http://127.0.0.1:8123/mcp"\n[environment.healthcheck]\ncommand = {json.dumps(SERVE)}\n'
    (task / "task.toml").write_text(f'{toml}name = "counter"\ntransport = "{transport}"\n{server}')
    return ["env=harbor", f"env.path={folder.absolute()}"]


def execute(
    run_dir: str, agent: str, container: str, *overrides: str, replies: list[Any] | None = None, delay_sec: float = 0.0
) -> RunResults:
    """Runs one episode of write-greeting in the working directory."""
    folder = Path("options/policy")
    folder.mkdir(parents=True, exist_ok=True)
    policy = {
        "_target_": "tests.slow_policy.SlowPolicy",
        "_convert_": "all",
        "replies": SCRIPTS[agent] if replies is None else replies,
        "delay_sec": delay_sec,
    }
    (folder / f"{run_dir}.yaml").write_text(json.dumps(policy))
    words = ["env.tasks=[write-greeting]", f"agent={agent}", f"container={container}"]
    words += [f"policy={run_dir}", "collector=json", "tracker=none", f"hydra.run.dir={run_dir}"]
    return ares_exp.run([*words, *OPTIONS.get(agent, ()), *overrides], config_dirs=["options"], quiet=True)


def check_solved(run_dir: str, results: RunResults) -> EpisodeTrajectory:
    """Checks that the episode was solved with exactly the expected observations, and without a network."""
    assert results.exit_code == 0, results
    [episode] = load(Path(run_dir)).trajectories()
    assert (episode.outcome, episode.total_reward) == ("completed", 1.0)
    assert [step.step_type for step in episode.steps] == ["FIRST", "MID", "LAST"]
    first, second = (step.observation for step in episode.steps[:2])
    assert first is not None
    assert second is not None
    assert "Create the file `/app/greeting.txt`" in json.dumps(first["messages"])
    assert second["messages"][: len(first["messages"])] == first["messages"]
    assert not OF_PROVIDERS & {tool.get("name") or tool["function"]["name"] for tool in first["tools"]}
    shown = json.dumps(second["messages"][-1])
    assert all(text in shown for text in SHOWN), shown
    [kept] = Path(run_dir).glob("files/*/agent")
    assert (kept / "output.txt").stat().st_size > 0
    return episode
