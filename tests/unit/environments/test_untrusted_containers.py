"""What an agent leaves behind in its container must not turn a reward of 0 into an error that nobody counts."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.containers.local_containers import USER
from tests.unit.environments.snapshots import SUBMIT, run
from tests.unit.environments.steps import MakeSteps

pytestmark = pytest.mark.local

LISTS = "#!/bin/sh\nls -A /tests | paste -sd' '\necho 0 > /logs/verifier/reward.txt\n"
IN_THE_WAY = [
    *("mkfifo /tests", "ln -s /nowhere/at/all /tests", "ln -s /proc /tests"),
    *("mkdir -p /tests/test.sh/x; touch /tests/conftest.py", "mkdir -m 000 /tests"),
    *("rm -rf /logs; ln -s /logs /logs", "rm -rf /logs; ln -s /proc /logs"),
    "rm -rf /logs/verifier; mkfifo /logs/verifier",
    *("mkdir /logs/verifier/test-stdout.txt /logs/verifier/reward.json", "mkfifo /logs/verifier/test-stdout.txt"),
    "truncate -s 3G /logs/verifier/big; touch \"$(printf '/logs/verifier/a\\nb')\"",
    "chmod 700 / /logs /logs/verifier",
]


@pytest.mark.parametrize("command", IN_THE_WAY)
async def test_obstacles_in_tests_directory_are_tolerated(
    make_environment: Any, make_task: Any, tmp_path: Path, command: str
) -> None:
    task = make_task(test=LISTS, toml=f"[verifier]\nuser = {USER}\n")
    env = make_environment(task, output_dir=tmp_path / "out")
    await env.reset()
    await env.step(run(command))
    assert (await env.step(SUBMIT)).reward == 0
    assert (tmp_path / "out/verifier/test-stdout.txt").read_text() == "test.sh\n"


@pytest.mark.parametrize("command", ["rm -rf /logs /tests; touch /logs /tests", "rm -rf /logs; ln -s /proc /logs"])
async def test_obstacles_are_tolerated_in_each_step(make_environment: Any, make_steps: MakeSteps, command: str) -> None:
    env = make_environment(make_steps())
    await env.reset()
    await env.step(run(f"echo one > /work/log; {command}"))
    await env.step(SUBMIT)
    await env.step(run(command))
    assert (await env.step(SUBMIT)).reward == 0.75


async def test_tests_in_the_image_are_restored(make_environment: Any, make_task: Any, tmp_path: Path) -> None:
    task = make_task(test="#!/bin/sh\ncat /tests/data\nls /tests\necho 0 > /logs/verifier/reward.txt\n")
    (task.path / "environment/Dockerfile").write_text("FROM a\nRUN mkdir /tests && echo of-image > /tests/data\n")
    env = make_environment(task, output_dir=tmp_path / "out")
    await env.reset()
    await env.step(run("echo changed > /tests/data; touch /tests/conftest.py"))
    assert (await env.step(SUBMIT)).reward == 0
    assert (tmp_path / "out/verifier/test-stdout.txt").read_text().split() == ["of-image", "data", "test.sh"]


async def test_excess_output_is_left_out_with_warning(
    make_environment: Any, make_task: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    test = "#!/bin/sh\necho 0 > /logs/verifier/reward.txt\n"
    long = "cd /logs/verifier; n=$(printf %0200d 0); for i in $(seq 25); do mkdir $n; cd $n; done\n"
    env = make_environment(make_task(test=test + long), output_dir=tmp_path / "out")
    await env.reset()
    assert (await env.step(SUBMIT)).reward == 0
    assert "Only a part of /logs/verifier (reward.txt) was copied out of the container" in caplog.text


async def test_artifact_may_replace_another_file_kind(make_environment: Any, make_task: Any) -> None:
    toml = "artifacts = ['/data/out', '/data/file']\n[verifier]\nenvironment_mode = 'separate'\n"
    task = make_task(test="#!/bin/sh\ncat /data/out /data/file/x > /logs/verifier/reward.txt\n", toml=toml)
    (task.path / "environment/Dockerfile").write_text("FROM a\nRUN mkdir -p /data/out/x && touch /data/file\n")
    env = make_environment(task)
    await env.reset()
    await env.step(run("cd /data; rm -r *; printf 0 > out; mkdir file; printf .5 > file/x"))
    assert (await env.step(SUBMIT)).reward == 0.5
