"""The contract of verification on every backend: processes that the agent left running do not write the reward.

Each process of the agent runs in a loop. The test script writes a reward of 0 and ends after the loop has run again
twice, or when its process is gone.
"""

import asyncio
from pathlib import Path

import pytest

from ares_exp.containers.container import ContainerFactory
from ares_exp.environments.scoring.episode_scoring import Scoring
from ares_exp.tasks.harbor_task import load_task

AGENT = "nobody"
LOOP = """
n=0
echo $$ >/tmp/pid
while :; do
  n=$((n + 1))
  {attack}
  echo $n >/tmp/.beat && mv -f /tmp/.beat /tmp/beat
done
"""
TEST = """#!/bin/sh
beat() { cat /tmp/beat || echo 0; }
write() { echo 0 >"$1" && chmod 644 "$1"; }
write /logs/verifier/details
write /logs/verifier/reward.txt
first=$(beat)
until [ "$(beat)" -gt "$((first + 2))" ] || [ -z "$(tr -d '\\0' <"/proc/$(cat /tmp/pid)/cmdline")" ]; do :; done
stat -c '%a %U' /logs/verifier
if [ -e /tmp/by-details ]; then cp /logs/verifier/details /logs/verifier/reward.txt; fi
"""
"""Writes a reward of 0, and if the attack asks for it, a second time from a file that it wrote before."""
ATTACKS = {
    "writes the reward": ("root", "cd /logs/verifier && echo 1 >.x && mv -f .x reward.txt"),
    "replaces a directory": (
        "games",
        "mv /logs/verifier /logs/$n && mkdir -m 777 /logs/verifier && echo 1 >/logs/verifier/reward.txt",
    ),
    "redirects a file": (
        "root",
        "touch /tmp/by-details; ln -sfn /tmp/mine /logs/verifier/details; "
        "echo 1 >/tmp/.mine && mv -f /tmp/.mine /tmp/mine",
    ),
    "keeps its own file": (
        "games",
        "touch /tmp/by-details; echo 1 >/tmp/.mine; chmod 666 /tmp/.mine; mv -f /tmp/.mine /logs/verifier/details",
    ),
}
"""The verifier's user, and the command that the agent repeats."""


class RewardContract:
    """Runs each attack between the agent and the tests, with the backend of the fixture `factory`.

    Attributes:
        docker_image: The image of the task; `None`: it has a Dockerfile.
    """

    docker_image: str | None = "debian:bookworm-slim"

    @pytest.mark.parametrize("attack", ATTACKS)
    async def test_process_of_another_user_writes_no_reward(
        self, factory: ContainerFactory, tmp_path: Path, attack: str
    ) -> None:
        verifier, command = ATTACKS[attack]
        toml = f"[agent]\nuser = '{AGENT}'\n[verifier]\nuser = '{verifier}'\n"
        assert await self._reward(factory, tmp_path, toml, command, f"chown {AGENT} /logs") == 0
        assert (tmp_path / "out" / "verifier" / "test-stdout.txt").read_text() == f"755 {verifier}\n"

    async def test_stopped_process_does_not_write_the_reward(self, factory: ContainerFactory, tmp_path: Path) -> None:
        toml = "[metadata]\nstop_processes = true\n"
        assert await self._reward(factory, tmp_path, toml, ATTACKS["writes the reward"][1], "true") == 0

    async def _reward(
        self, factory: ContainerFactory, folder: Path, toml: str, command: str, prepare: str
    ) -> float | None:
        root = folder / "task"
        for name in ("environment", "tests"):
            (root / name).mkdir(parents=True)
        image = f"[environment]\ndocker_image = '{self.docker_image}'\n" if self.docker_image else ""
        (root / "task.toml").write_text(f"{image}{toml}")
        (root / "instruction.md").write_text("Do it.\n")
        (root / "tests" / "test.sh").write_text(TEST)
        if self.docker_image is None:
            (root / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\n")
        (stage,) = (task := load_task(root)).stages
        scoring = Scoring(
            stage,
            container_factory=factory,
            agents_spec=task.container_spec,
            verifier_spec=None,
            timeout_sec=60,
            output_dir=folder / "out",
        )
        async with factory(task.container_spec) as container, asyncio.timeout(120):
            await task.set_up(container)
            await container.exec(prepare, user="root")
            script = LOOP.replace("{attack}", command)
            user = stage.agent_user
            await container.exec(f"setsid env -i sh -c '{script}' >/dev/null 2>&1 &", user=user, cwd="/tmp")
            await container.exec("until [ -e /tmp/beat ]; do :; done", user=user, timeout_sec=30)
            verdict = await scoring.run(container, verify=True, is_last=False)
        return verdict.reward if verdict is not None else None
