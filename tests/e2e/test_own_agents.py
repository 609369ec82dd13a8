"""The package's agents other than the shell agent: whole runs, each step branched, and run again."""

import json
from pathlib import Path
from typing import Any

import pytest

import ares_exp
from ares_exp.trajectories import load
from ares_exp.trajectories.records import EpisodeTrajectory

pytestmark = [pytest.mark.local, pytest.mark.once, pytest.mark.usefixtures("here")]


def tools(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"text": "Now.", "tool_calls": [{"name": name, "arguments": given} for name, given in calls]}


def keys(*typed: str, done: bool = False, seconds: float = 0.5) -> str:
    commands = [{"keystrokes": one, "duration": seconds} for one in typed]
    return json.dumps({"analysis": "a", "plan": "p", "commands": commands, "task_complete": done})


SCRIPTS: dict[str, list[Any]] = {
    "tools": [
        tools(
            ("bash", {"command": "ls -a /app; echo $RANDOM > /tmp/drawn; cat /tmp/drawn"}),
            ("edit", {"command": "create", "path": "/app/greeting.txt", "file_text": "Hello, harbour!\n"}),
        ),
        "I have to think.",
        tools(("bash", {"command": "cat /app/greeting.txt /tmp/drawn"}), ("look", {})),
        tools(
            ("edit", {"command": "str_replace", "path": "/app/greeting.txt", "old_str": "bour", "new_str": "bor"}),
            ("edit", {"command": "view", "path": "/app/greeting.txt"}),
        ),
        tools(("submit", {})),
    ],
    "terminal": [
        keys("echo $RANDOM > /tmp/drawn; cat /tmp/drawn; ls /app\n"),
        "I have to think.",
        keys("cat > /app/greeting.txt\n", "Hello, harbour!\n", "C-d", "cat /app/greeting.txt\n"),
        keys("sed -i s/bour/bor/ /app/greeting.txt\n", done=True),
        keys(done=True),
    ],
}
"""Replies that solve the task write-greeting."""


def execute(run_dir: str, *overrides: str, replies: list[Any] | None = None) -> EpisodeTrajectory:
    words = ["tracker=none", f"hydra.run.dir={run_dir}", *overrides]
    if replies is not None:  # JSON is also YAML: a custom option needs no quoting
        Path("options/policy").mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {"_target_": "ares_exp.policies.scripted.ScriptedPolicy", "_convert_": "all", "replies": replies}
        )
        Path(f"options/policy/{run_dir}.yaml").write_text(text)
        words.append(f"policy={run_dir}")
    results = ares_exp.run(words, config_dirs=["options"], quiet=True)
    assert results.exit_code == 0, results
    [episode] = load(Path(run_dir)).trajectories()
    return episode


@pytest.mark.parametrize(
    ("agent", "container"),
    [
        ("tools", "local"),
        pytest.param("terminal", "local", marks=pytest.mark.nightly),
        pytest.param("terminal", "docker", marks=[pytest.mark.docker, pytest.mark.nightly]),
    ],
)
def test_every_step_is_branched_and_run_again(agent: str, container: str) -> None:
    replies = SCRIPTS[agent]
    words = [f"agent={agent}", "env.tasks=write-greeting", f"container={container}", "snapshot=every_step"]
    first = execute("first", *words, replies=replies)
    assert (first.total_reward, first.step_count) == (1.0, len(replies))
    for step in range(1, len(replies)):
        branch = execute(f"b{step}", f"branch_from=first/write-greeting@{step}", replies=replies[step:])
        assert branch.total_reward == 1.0
        compared = step + 1 if agent == "terminal" else None  # after that its terminal is another one
        pairs = zip(branch.steps[:compared], first.steps[:compared], strict=True)
        assert all(one.observation == other.observation for one, other in pairs)
        assert [one.action for one in branch.steps] == [one.action for one in first.steps]
    ares_exp.run(["replay=first", "hydra.run.dir=again"], quiet=True)
    report = json.loads(Path("again/replay.json").read_text())
    [episode] = report["episodes"]
    first_match, second_match = [step["match"] for step in episode["steps"][:2]]
    assert first_match in ("exact", "normalised")  # a container's name is on the screen
    assert second_match == "different"  # the random number
    assert episode["reward"]["now"] == 1.0


@pytest.mark.parametrize("agent", ["tools", pytest.param("terminal", marks=pytest.mark.nightly)])
def test_solutions_solve_the_bundled_tasks(agent: str) -> None:
    results = ares_exp.run([f"agent={agent}", "policy=oracle", "tracker=none", "concurrency=2"], quiet=True)
    assert [row.reward for row in results.rows] == [1.0] * 6
    assert [row.format_errors for row in results.rows] == [0] * 6
