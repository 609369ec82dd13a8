"""Processes that run an episode, die in the middle of it, and continue it: the programs of `test_kill_and_continue.py`.

`python -m tests.e2e.continued_episode run DIRECTORY BACKEND AGENT [STEP]` runs the task in `DIRECTORY/task`. At STEP
it exports the episode to `DIRECTORY/store` and kills itself; without it, it runs to the end. `… continue DIRECTORY
BACKEND AGENT` continues every snapshot in the store. Both print trajectories.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ares_exp import DockerContainerFactory, LocalContainerFactory
from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.tasks.harbor_task import load_task
from ares_exp.trajectories.collecting_environment import TrajectoryCollectingEnvironment
from ares_exp.trajectories.collector import EpisodeCollector
from ares_exp.trajectories.records import EpisodeTrajectory
from tests.agents.thorough_agent import ThoroughAgentFactory

AGENTS: dict[str, Any] = {
    "shell": ShellAgentFactory(command_timeout_sec=1.5),
    "thorough": ThoroughAgentFactory(settled=True),
}
REPLIES = {
    "shell": [
        "```bash\nmkdir -p /work/in && cd /work && echo 42 > in/answer && ln -s in/answer link && echo made\n```",
        "I have to think.",
        "```bash\nrm -f /etc/debian_version; ls /etc/debian_version; chmod 700 /work; echo started; sleep 30\n```",
        "```bash\ncd /work; cat link; cp link /answer; stat -c '%A %s %N' . in link; rm -r /work\n```",
        "```bash\nls /work; cat /answer; exit 7\n```",
        "```bash\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```",
    ],
    "thorough": ["good", "echo 41 > /answer", "better", "cat /answer", "best", "done"],
}
BACKENDS = {"local": LocalContainerFactory, "docker": DockerContainerFactory}


async def execute(directory: Path, backend: str, agent: str, stop_at: int | None) -> EpisodeTrajectory | None:
    """One episode, from its start."""
    env = CodeEnvironment(
        [load_task(directory / "task")], container_factory=BACKENDS[backend](), code_agent_factory=AGENTS[agent], seed=3
    )
    async with TrajectoryCollectingEnvironment(env, EpisodeCollector()) as collecting:
        await collecting.reset()
        return await _to_the_end(collecting, agent, stop_at, directory / "store")


async def go_on(snapshot: Path, agent: str) -> EpisodeTrajectory | None:
    """One episode, from a snapshot."""
    env = await CodeEnvironment.load_from_state(
        snapshot, code_agent_factory=AGENTS[agent] if agent == "thorough" else None
    )
    async with TrajectoryCollectingEnvironment(env, EpisodeCollector()) as collecting:
        return await _to_the_end(collecting, agent)


async def _to_the_end(
    env: Any, agent: str, stop_at: int | None = None, store: Path | None = None
) -> EpisodeTrajectory | None:
    while not env.time_step.last():
        if env.step_count == stop_at:
            await env.export_state(store, snapshot_id=f"{agent}@{stop_at}")
            os.kill(os.getpid(), signal.SIGKILL)
        reply = REPLIES[agent][env.step_count]
        await env.step(LLMResponse.from_text(reply, usage=Usage(len(reply), 1), cost=0.5))
    trajectory: EpisodeTrajectory | None = env.trajectory
    return trajectory


def without_clocks(trajectory: EpisodeTrajectory | None, agent: str) -> dict[str, Any]:
    """What two episodes have in common that go the same way, JSON-ready.

    The commands of concurrent agents are left out: which of them was given up in time is a matter of luck.
    """
    assert trajectory is not None
    return {
        "outcome": trajectory.outcome,
        "reward": trajectory.total_reward,
        "task": trajectory.task_name,
        "steps": [
            {
                "step": [step.step_index, step.step_type, step.reward, step.discount],
                "observation": step.observation,
                "action": step.action,
                "commands": [[one.command, one.exit_code, one.timed_out] for one in step.commands or ()]
                if agent == "shell"
                else [],
            }
            for step in trajectory.steps
        ],
    }


async def main(what: str, directory: Path, backend: str, agent: str, step: int | None = None) -> Any:
    """See the module."""
    if what == "execute":
        return without_clocks(await execute(directory, backend, agent, step), agent)
    snapshots = sorted(path.parent for path in directory.glob("store/*/snapshot.json"))
    continued = await asyncio.gather(*(go_on(path, agent) for path in snapshots))
    return {path.name: without_clocks(one, agent) for path, one in zip(snapshots, continued, strict=True)}


if __name__ == "__main__":
    given = sys.argv[1:]
    print(json.dumps(asyncio.run(main(given[0], Path(given[1]), given[2], given[3], *map(int, given[4:])))))
