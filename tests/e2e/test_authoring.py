"""`ares-exp task new` and `ares-exp task check`, as an author of tasks uses them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SECRET_FREE, Cli

pytestmark = pytest.mark.once
WITHOUT_REWARD = "set -e\nread -r sum < /app/sum.txt\necho 1 > /logs/verifier/reward.txt\n"


@pytest.mark.nightly  # the daily run has the page about tasks
@pytest.mark.parametrize(
    "container", [pytest.param("local", marks=pytest.mark.local), pytest.param("docker", marks=pytest.mark.docker)]
)
def test_new_task_passes_its_check(cli: Cli, tmp_path: Path, container: str) -> None:
    made = cli("task", "new", "tasks/my-task")
    assert made.returncode == 0, made.stderr
    assert "ares-exp task check tasks/my-task" in made.stdout
    done = cli("task", "check", "tasks/my-task", "--container", container, "--out", "checked", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    [task] = json.loads(done.stdout)["tasks"]
    assert (task["good"], task["solution"], task["nothing"]) == (True, [1.0], [0.0])
    for run, policy in (("solution", "Oracle"), ("nothing", "Noop")):
        recorded = (tmp_path / "checked" / run / "config.yaml").read_text()
        assert f"{policy}Policy" in recorded


def make(cli: Cli, tmp_path: Path, **files: tuple[str, str]) -> None:
    """Makes new tasks, each with one file replaced."""
    assert cli("task", "new", "new").returncode == 0
    for name, (file, text) in files.items():
        shutil.copytree(tmp_path / "new", tmp_path / "tasks" / name)
        (tmp_path / "tasks" / name / file).write_text(f"#!/usr/bin/env bash\n{text}")


def make_two_steps(root: Path) -> None:
    (root / "environment").mkdir(parents=True)
    (root / "environment" / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /app\n")
    (root / "task.toml").write_text('[[steps]]\nname = "make"\n[[steps]]\nname = "use"\n')
    for step, solution in (("make", "echo made; touch make"), ("use", "echo what was it")):
        for file, text in (
            ("instruction.md", "Do it.\n"),
            ("solution/solve.sh", f"#!/bin/bash\n{solution}\n"),
            (
                "tests/test.sh",
                f"#!/bin/bash\necho look for {step}\n[ ! -e {step} ]; echo $? >/logs/verifier/reward.txt\n",
            ),
        ):
            path = root / "steps" / step / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@pytest.mark.local
def test_each_kind_of_fault_is_reported(cli: Cli, tmp_path: Path) -> None:
    make(
        cli,
        tmp_path,
        sound=("solution/solve.sh", "echo 12 > /app/sum.txt\n"),
        wrong=("solution/solve.sh", "echo I guess 13; echo 13 > /app/sum.txt\n"),
        lavish=("tests/test.sh", "echo all is well; echo 1 > /logs/verifier/reward.txt\n"),
        strict=("tests/test.sh", WITHOUT_REWARD),
        broken=("task.toml", "[agent]\ntimeout_sec = 'soon'\n"),
    )
    make_two_steps(tmp_path / "tasks" / "two")
    done = cli("task", "check", "tasks", "concurrency=2")
    assert done.returncode == 1, done.stderr
    told = " ".join(done.stdout.split())
    assert "sound 1.00 0.00 good" in told
    assert "wrong 0.00 0.00 solution fails" in told
    assert "wrong: the solution has reward 0.00, and at least 1.00 is required." in told
    assert "| I guess 13" in told
    assert "| expected 12, found 13" in told
    assert "lavish: an agent that does nothing has reward 1.00, so the tests do not check the work." in told
    assert "| all is well" in told
    assert "strict: the tests write no reward for an agent that does nothing (expected 0)" in told
    assert "broken - - invalid" in told
    assert "agent.timeout_sec" in told
    assert "The tests of 1 of 6 tasks accept the solution and reject an agent that does nothing." in told
    assert "error" not in done.stderr
    assert "two 0.50 0.00 solution fails" in told
    assert "the solution of step make printed (exit code 0): | made the solution" in told
    assert "the solution of step use printed (exit code 0): | what was it" in told
    assert re.search(r"\(steps/make/verifier/test-stdout.txt\): \| look for make .* \| look for use", told)
    shown = next(line for line in done.stdout.splitlines() if line.startswith("  show:  ares-exp show "))
    assert cli("show", shown.rpartition(" ")[2]).returncode == 0
    files = next(line for line in done.stdout.splitlines() if line.startswith("  files: "))
    assert (tmp_path / files.removeprefix("  files: ") / "verifier" / "test-stdout.txt").is_file()


@pytest.mark.local
def test_faults_are_json_and_attempts_judged_together(cli: Cli, tmp_path: Path) -> None:
    make(
        cli,
        tmp_path,
        halves=("tests/test.sh", "echo 0.5 > /logs/verifier/reward.txt\n"),
        broken=("task.toml", "[agent]\ntimeout_sec = 'soon'\n"),
    )
    done = cli("task", "check", "tasks", "attempts=2", "reward_threshold=0.4", "--json")
    as_json: dict[str, Any] = json.loads(done.stdout)
    faults = {task["name"]: [problem["fault"] for problem in task["problems"]] for task in as_json["tasks"]}
    assert faults == {"broken": ["invalid"], "halves": ["tests_do_not_test"]}
    [halves] = [task for task in as_json["tasks"] if task["name"] == "halves"]
    assert (halves["solution"], halves["nothing"]) == ([0.5, 0.5], [0.5, 0.5]), "attempts are judged together"
    assert not as_json["good"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "There is no folder nowhere"),
        ([], "PATH"),
        (["concurrency=2"], "Expected the path of a task"),
        (["tasks", "policy=scripted"], "`policy` cannot be set here"),
        (["tasks", "env.path=elsewhere"], "`env.path` cannot be set here"),
        (["tasks", "attempts=0"], "Expected `attempts` to be at least 1"),
        (["tasks", "contaner=docker"], "Did you mean `container`?"),
        (["tasks", "--container=dokker"], "There is no option `dokker`"),
        (["tasks", "--out", "tasks"], "`--out tasks` is not empty"),
        (["tasks", "--container=docker"], "unix:///nowhere"),
    ],
)
def test_mistakes_give_an_error_without_traceback(cli: Cli, tmp_path: Path, arguments: list[str], told: str) -> None:
    assert cli("task", "new", "tasks/a").returncode == 0
    done = cli("task", "check", *arguments, env={"DOCKER_HOST": "unix:///nowhere"})
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert "Running" not in done.stderr
    assert not list(tmp_path.glob("outputs/task-check/*")), "nothing was run"


@pytest.mark.local
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_interrupted_check_stops_its_processes(cli: Cli, tmp_path: Path, number: signal.Signals) -> None:
    make(cli, tmp_path, slow=("solution/solve.sh", "sleep 300\n"))
    command = [sys.executable, "-m", "ares_exp", "task", "check", "tasks/slow", "--out", "checked"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=SECRET_FREE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        responses = tmp_path / "checked" / "solution" / "responses"
        until = time.monotonic() + 60
        while not (responses.is_dir() and any(responses.iterdir())) and time.monotonic() < until:
            time.sleep(0.05)
        if number is signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        said, _ = process.communicate(timeout=60)  # at the end of the pipe, which the run holds, too
    assert process.returncode == (130 if number is signal.SIGINT else 143), said
    assert b"Traceback" not in said
