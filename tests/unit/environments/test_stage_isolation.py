"""What one stage, agent or episode must not learn of another, and what must not be kept of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.local.isolation import is_privileged
from tests.unit.environments.snapshots import SUBMIT, last_message, run
from tests.unit.environments.steps import DOCKERFILE, FIRST, TWO_STEPS, MakeSteps, shown

pytestmark = pytest.mark.local

SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"


@pytest.mark.parametrize("folder", ["/tests", "/logs/verifier"])
async def test_a_link_in_its_place_keeps_nothing_of_a_verification(
    make_environment: Any, make_steps: MakeSteps, folder: str
) -> None:
    env = make_environment(make_steps())
    await env.reset()
    await env.step(run(f"echo one > /work/log; mkdir /stash; rm -rf {folder}; ln -s /stash {folder}"))
    between = await env.step(SUBMIT)
    assert "Write two." in shown(between)
    await env.step(run("ls -A /stash; echo listed"))
    assert "listed" in last_message(env)
    assert "test" not in last_message(env).partition("<output>")[2]
    assert (await env.step(SUBMIT)).reward == 0.75


async def test_a_file_in_the_place_of_the_tests(make_environment: Any, make_steps: MakeSteps) -> None:
    env = make_environment(make_steps())
    await env.reset()
    await env.step(run("echo one > /work/log; touch /tests"))
    await env.step(SUBMIT)
    assert [one.reward for one in env.report().stages] == [1.0]


async def test_artifacts_of_an_episode_before_reach_no_verifier(
    make_environment: Any, make_task: Any, tmp_path: Path
) -> None:
    test = "#!/bin/sh\nls -A /logs/artifacts /data 2>/dev/null | grep -c old > /logs/verifier/reward.txt\n"
    env = make_environment(make_task(toml="artifacts = ['/data']\n" + SEPARATE, test=test), output_dir=tmp_path / "out")
    rewards = []
    for commands in ("touch /logs/artifacts/old; mkdir /data; touch /data/old", "mkdir /data; touch /data/new"):
        await env.reset()
        await env.step(run(commands))
        rewards.append((await env.step(SUBMIT)).reward)
    assert rewards == [2.0, 0.0]
    assert not list((tmp_path / "out").rglob("old"))


@pytest.mark.parametrize("kept", ["artifacts/first", "verifier/first"])
async def test_secrets_are_blanked_also_in_what_a_cancellation_leaves(
    make_environment: Any, make_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", "sk-the-very-secret")
    toml = (
        "artifacts = ['/first', '/a', '/b', '/c']\n[verifier.env]\nSERVICE_API_KEY = '${SERVICE_API_KEY}'\n"
        "[[verifier.collect]]\ncommand = 'echo sk-the-very-secret > /first'\n"
    )
    test = "#!/bin/sh\ncp /first /logs/verifier; echo 1 > /logs/verifier/reward.txt\n"
    env = make_environment(make_task(toml=toml, test=test), output_dir=tmp_path / "out")
    await env.reset()
    stepping = asyncio.create_task(env.step(SUBMIT))
    file = tmp_path / "out" / kept
    async with asyncio.timeout(30):
        while not file.exists():  # noqa: ASYNC110  # a moment in the middle of a call
            await asyncio.sleep(0)
    stepping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    assert "very-secret" not in file.read_text()


async def test_secrets_of_one_stage_are_blanked_in_the_artifacts_of_another(
    make_environment: Any, make_steps: MakeSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_API_KEY", "sk-the-very-secret")
    toml = (
        "[[steps]]\nname = 'one'\n[steps.verifier.env]\nSERVICE_API_KEY = '${SERVICE_API_KEY}'\n"
        "[[steps]]\nname = 'two'\n"
    )
    leaks = "#!/bin/sh\necho $SERVICE_API_KEY > /work/log; echo 1 > /logs/verifier/reward.txt\n"
    env = make_environment(make_steps(toml, files={"steps/one/tests/test.sh": leaks}), output_dir=tmp_path / "out")
    await env.reset()
    await env.step(SUBMIT)
    await env.step(run("cp /work/log /logs/artifacts/key"))
    await env.step(SUBMIT)
    kept = (tmp_path / "out" / "steps" / "two" / "artifacts" / "logs" / "artifacts" / "key").read_text()
    assert kept.strip()
    assert "very-secret" not in kept


async def test_nobody_but_its_stage_has_the_tests(make_environment: Any, make_steps: MakeSteps) -> None:
    env = make_environment(make_steps(files={"tests/shared": "", "steps/one/tests/test.sh": FIRST}))
    await env.reset()
    await env.step(run("echo one > /work/log; ls -d /tests /solution /work/*; echo listed"))
    assert "/tests/" not in last_message(env)
    assert "/solution" not in last_message(env).replace("'/solution'", "")
    await env.step(SUBMIT)
    await env.step(run("find /tests /logs; echo listed"))
    assert "test.sh" not in last_message(env)
    assert "shared" not in last_message(env)
    assert "reward" not in last_message(env)


@pytest.mark.skipif(not is_privileged(), reason="local containers of an ordinary user have only one user")
async def test_the_next_agent_can_write_to_the_logs_again(make_environment: Any, make_steps: MakeSteps) -> None:
    modes = "stat -c '%U %a %n' /logs /logs/*"
    files = {
        "environment/Dockerfile": f"{DOCKERFILE}RUN chmod 777 . && mkdir -m 775 /logs && chown nobody:games /logs\n",
        "steps/one/tests/test.sh": f"{FIRST}{modes}\n",
    }
    users = "[agent]\nuser = 'nobody'\n[verifier]\nuser = 'games'\n"
    env = make_environment(make_steps(users + TWO_STEPS, files=files))
    await env.reset()
    await env.step(run(f"{modes} >before; echo one >log"))
    await env.step(SUBMIT)
    await env.step(run(f"cd /logs && touch verifier/x agent/x x && rm x && {modes} | diff /work/before -"))
    assert "<exit_code>0</exit_code>" in last_message(env)
    await env.step(run("cat before"))
    assert "nobody 775 /logs\nroot 777 /logs/agent" in last_message(env)
    assert (await env.step(SUBMIT)).reward == 0.75
