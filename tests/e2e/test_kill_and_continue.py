"""An episode is exported at a step and its process killed; a new process continues to the same result."""

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.continued_episode import REPLIES
from tests.warm_start import warm_command

TASK = """
schema_version = "1.4"
[task]
name = "test/answer"
[environment]
docker_image = "debian:bookworm-slim"
network_mode = "no-network"
"""
TEST = """#!/bin/sh
[ "$(cat /answer)" = 42 ] && [ ! -e /work ] && reward=1 || reward=0.25
echo $reward > /logs/verifier/reward.txt
"""
AT_ONCE = 3


def make_task(directory: Path) -> None:
    for folder in ("environment", "tests"):
        (directory / "task" / folder).mkdir(parents=True)
    (directory / "task" / "task.toml").write_text(TASK)
    (directory / "task" / "instruction.md").write_text("Write 42 to /answer.\n")
    (directory / "task" / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\n")
    (directory / "task" / "tests" / "test.sh").write_text(TEST)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*warm_command("tests.e2e.continued_episode"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.local
@pytest.mark.parametrize(
    "agent", [pytest.param("shell", marks=pytest.mark.once), pytest.param("thorough", marks=pytest.mark.nightly)]
)
def test_new_process_continues_from_every_step(tmp_path: Path, agent: str) -> None:
    check_every_step(tmp_path, "local", agent)


@pytest.mark.docker
@pytest.mark.nightly
@pytest.mark.once
def test_new_process_continues_from_docker_steps(tmp_path: Path) -> None:
    check_every_step(tmp_path, "docker", "thorough")


def check_every_step(directory: Path, backend: str, agent: str) -> None:
    make_task(directory)
    given = (str(directory), backend, agent)
    steps = range(len(REPLIES[agent]))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        whole = threads.submit(run, "execute", *given)
        killed = list(threads.map(lambda step: run("execute", *given, str(step)), steps))
        uninterrupted = whole.result()
    assert [one.returncode for one in killed] == [-signal.SIGKILL] * len(steps), killed[0].stderr
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    continued = run("continue", *given)
    assert continued.returncode == 0, continued.stderr
    expected, found = json.loads(uninterrupted.stdout), json.loads(continued.stdout)
    assert expected["reward"] == (1.0 if agent == "shell" else 0.25)
    assert len(expected["steps"]) == len(steps) + 1
    assert sorted(found) == [f"{agent}@{step}" for step in steps]
    for name in found:
        assert found[name] == expected, name
