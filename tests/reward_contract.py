"""The contract of verification on every backend: processes that the agent left running do not write the reward.

The agent's user and the verifier's user differ. Each process of the agent runs in a loop until the test script has
seen it twice after its own first write.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ares_exp.containers.container import ContainerFactory
from ares_exp.containers.network_policy import NO_NETWORK
from ares_exp.environments.scoring import Scoring
from ares_exp.tasks.harbor import load_task

AGENT = "nobody"
LOOP = """
n=0
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
until [ "$(beat)" -gt "$((first + 2))" ]; do :; done
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
    """Plays each attack between the agent and the tests, with the backend of the fixture `factory`.

    Attributes:
        docker_image: The image of the task; `None`: it has a Dockerfile.
    """

    docker_image: str | None = "debian:bookworm-slim"

    @pytest.mark.parametrize("attack", ATTACKS)
    async def test_a_process_left_running_does_not_write_the_reward(
        self, factory: ContainerFactory, tmp_path: Path, attack: str
    ) -> None:
        verifier, command = ATTACKS[attack]
        root = tmp_path / "task"
        for folder in ("environment", "tests"):
            (root / folder).mkdir(parents=True)
        image = f"[environment]\ndocker_image = '{self.docker_image}'\n" if self.docker_image else ""
        (root / "task.toml").write_text(f"{image}[agent]\nuser = '{AGENT}'\n[verifier]\nuser = '{verifier}'\n")
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
            output_dir=tmp_path / "out",
        )
        async with factory(task.container_spec) as container, asyncio.timeout(120):
            await task.set_up(container)
            await container.exec(f"chown {AGENT} /logs", user="root")  # as an image may bring it
            script = LOOP.replace("{attack}", command)
            await container.exec(f"setsid sh -c '{script}' >/dev/null 2>&1 &", user=AGENT, cwd="/tmp")
            await container.exec("until [ -e /tmp/beat ]; do :; done", user=AGENT, timeout_sec=30)
            verdict = await scoring.run(container, NO_NETWORK, verify=True, is_last=False)
        assert verdict is not None
        assert verdict.reward == 0
        assert (tmp_path / "out" / "verifier" / "test-stdout.txt").read_text() == f"755 {verifier}\n"
