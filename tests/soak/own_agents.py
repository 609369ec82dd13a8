"""Every step of the bundled tasks branched, and every episode played again: both agents, on each backend.

`python -m tests.soak.own_agents [BACKEND …]` prints a line for each agent on each backend (`local`, `docker`), and what
differs. Its exit code is 1 if anything does.

A branch has to ask what the episode asked and to have its reward; of the terminal agent up to the step after the
branch, because its terminal is another one from there on. An episode that is played again has to ask the same.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ares_exp
from tests.e2e.test_own_agents import keys, play, tools

SAMPLES = Path(__file__).parents[2] / "ares_exp" / "tasks" / "samples"
SOLVE = "/tmp/solve.sh"


def by_tools(solution: str) -> list[Any]:
    return [
        tools(("bash", {"command": "ls -R /app"}), ("bash", {"command": "pwd; cat /etc/hostname | wc -l"})),
        tools(("edit", {"command": "create", "path": SOLVE, "file_text": solution})),
        tools(("bash", {"command": f"bash {SOLVE}"}), ("look", {})),
        tools(("edit", {"command": "view", "path": SOLVE}), ("bash", {"command": "ls -R /app"})),
        tools(("submit", {})),
    ]


def by_terminal(solution: str) -> list[Any]:
    written = base64.b64encode(solution.encode()).decode()
    return [
        keys("PS1='$ '\n", "clear\n", "ls -R /app | head -30\n", seconds=1.0),
        keys(f"echo {written} | base64 -d > {SOLVE}\n", seconds=1.0),
        keys(f"bash {SOLVE}; echo ended\n", seconds=3.0),
        keys("clear; ls -R /app | head -30\n", done=True, seconds=1.0),
        keys(done=True),
    ]


SCRIPTS = {"tools": by_tools, "terminal": by_terminal}


class Counts:
    """What was played, and what differs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.episodes = self.branches = self.steps = self.replayed = 0
        self.different: list[str] = []

    def see(self, equal: bool, what: str) -> None:
        if not equal:
            self.different.append(what)

    def __str__(self) -> str:
        played = f"{self.episodes} episodes, {self.branches} branches with {self.steps} steps compared"
        return f"{self.name}: {played}, {self.replayed} steps played again; {len(self.different)} differ"


def branch_every_step(task: str, agent: str, backend: str, counts: Counts) -> None:
    replies = SCRIPTS[agent]((SAMPLES / task / "solution" / "solve.sh").read_text())
    run = f"{agent}-{backend}-{task}"
    words = [f"agent={agent}", f"env.tasks={task}", f"container={backend}", "snapshot=every_step"]
    first = play(run, *words, replies=replies)
    counts.episodes += 1
    counts.see((first.total_reward, first.step_count) == (1.0, len(replies)), f"{run}: not solved")
    for step in range(1, len(replies)):
        branch = play(f"{run}-{step}", f"branch_from={run}/{task}@{step}", replies=replies[step:])
        counts.branches += 1
        compared = step + 1 if agent == "terminal" else len(replies)
        pairs = list(zip(branch.steps, first.steps, strict=True))
        for place, (one, other) in enumerate(pairs[:compared]):
            counts.see(one.observation == other.observation, f"{run}@{step}: observation {place}")
        counts.see(all(one.action == other.action for one, other in pairs), f"{run}@{step}: actions")
        counts.see(branch.total_reward == first.total_reward, f"{run}@{step}: reward")
        counts.steps += compared
    again = f"{run}-again"
    ares_exp.run([f"replay={run}", f"hydra.run.dir={again}"], quiet=True)
    [episode] = json.loads(Path(again, "replay.json").read_text())["episodes"]
    for step in episode["steps"]:
        counts.see(step["match"] in ("exact", "normalised"), f"{again}: step {step['step']} {step['match']}")
    counts.see(episode["reward"]["now"] == first.total_reward, f"{again}: reward")
    counts.replayed += len(episode["steps"])


def main(backends: list[str]) -> int:
    different = 0
    with tempfile.TemporaryDirectory(prefix="ares-exp-soak-") as folder:
        os.chdir(folder)
        for backend in backends:
            for agent in SCRIPTS:
                counts = Counts(f"agent={agent} container={backend}")
                for task in sorted(path.parent.name for path in SAMPLES.glob("*/task.toml")):
                    branch_every_step(task, agent, backend, counts)
                print(counts, *counts.different, sep="\n  ", flush=True)
                different += len(counts.different)
        os.chdir("/")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["local", "docker"]))
