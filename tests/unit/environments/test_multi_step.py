"""Tasks of several stages, in the local sandbox: one container, an agent and a verification for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.errors import NoRequestError, VerifierError, VerifierTimeoutError
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.tasks.verification.time_limits import TimeLimits
from tests.unit.environments.snapshots import SUBMIT, ask, last_message, run
from tests.unit.environments.steps import PASSES, TWO_STEPS, MakeSteps, shown

pytestmark = pytest.mark.local


async def test_stages_follow_each_other_in_one_container(
    make_environment: Any, make_steps: MakeSteps, tmp_path: Path
) -> None:
    env = make_environment(make_steps(), output_dir=tmp_path / "out")
    first = await env.reset()
    assert "Write one." in shown(first)
    await env.step(run("echo one > /work/log"))
    between = await env.step(SUBMIT)
    assert (between.step_type, between.reward, between.discount) == ("MID", 0.0, 1.0)
    assert "Write two." in shown(between)
    assert "Write one." not in shown(between)
    await env.step(run("cat /work/log; ls /tests /logs/verifier; echo two >> /work/log"))
    assert "one" in last_message(env)
    assert "test.sh" not in last_message(env)
    last = await env.step(SUBMIT)
    assert (last.step_type, last.discount, last.reward) == ("LAST", 0.0, 0.75)
    assert env.verdict.rewards == {"reward": 0.75, "lines": 1.0}
    assert [(one.name, one.reward, one.num_steps) for one in env.report().stages] == [("one", 1.0, 2), ("two", 0.5, 2)]
    assert (tmp_path / "out" / "steps" / "one" / "verifier" / "reward.txt").read_text().strip() == "1"
    assert (tmp_path / "out" / "steps" / "two" / "verifier" / "reward.json").exists()


@pytest.mark.parametrize(
    ("toml", "wrote", "reward", "ran"),
    [
        ("multi_step_reward_strategy = 'final'\n" + TWO_STEPS, "one", 0.5, 2),
        (TWO_STEPS.replace("'one'", "'one'\nmin_reward = 1"), "one", 0.75, 2),
        (TWO_STEPS.replace("'one'", "'one'\nmin_reward = 1"), "nothing", 0.0, 1),
        (TWO_STEPS.replace("'one'", "'one'\nmin_reward = {other = 0}"), "one", 1.0, 1),
        (TWO_STEPS.replace("'one'", "'one'\nmin_reward = {reward = 0.5}"), "one", 0.75, 2),
    ],
)
async def test_what_stages_are_worth(
    make_environment: Any, make_steps: MakeSteps, toml: str, wrote: str, reward: float, ran: int
) -> None:
    env = make_environment(make_steps(toml))
    await env.reset()
    await env.step(run(f"echo {wrote} > /work/log"))
    step = await env.step(SUBMIT)
    if ran == 2:
        step = await env.step(SUBMIT)
    assert (step.step_type, step.reward, len(env.report().stages)) == ("LAST", reward, ran)


async def test_the_oracle_solves_every_stage(make_environment: Any, make_steps: MakeSteps) -> None:
    env = make_environment(make_steps(), provide_solution=True)
    policy, step = OraclePolicy(), await env.reset()
    while not step.last():
        step = await env.step(await policy(step.observation))
    assert env.verdict.rewards == {"reward": 0.75, "lines": 1.0}


async def test_the_time_limit_is_that_of_the_stage(make_environment: Any, make_steps: MakeSteps) -> None:
    toml = TWO_STEPS + "[steps.agent]\ntimeout_sec = 60\n"
    env = make_environment(make_steps("[agent]\ntimeout_sec = 0.5\n" + toml))
    await env.reset()
    step = await env.step(run("echo one > /work/log; sleep 60"))
    assert (step.step_type, env.truncated_by) == ("MID", None)
    assert "Write two." in shown(step)
    assert env.time_left_sec > 30
    step = await env.step(SUBMIT)
    assert (step.reward, step.discount) == (0.75, 0.0)
    assert [one.truncated_by for one in env.report().stages] == ["time", None]


@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_limits_of_the_episode_go_over_all_stages(
    make_environment: Any, make_steps: MakeSteps, steps: int
) -> None:
    env = make_environment(make_steps(), limits=EpisodeLimits(steps=steps))
    await env.reset()
    for reply in (run("echo one > /work/log"), SUBMIT, run("true"), SUBMIT)[:steps]:
        step = await env.step(reply)
    assert (step.step_type, step.discount, env.truncated_by) == ("LAST", 1.0, "steps")
    assert step.reward == {1: 0.5, 2: 0.5, 3: 0.75}[steps]


@pytest.mark.parametrize("limit", ["steps", "time"])
async def test_one_that_is_asked_to_end_starts_no_other_stage(
    make_environment: Any, make_steps: MakeSteps, limit: str
) -> None:
    env = make_environment(make_steps())
    await env.reset()
    await env.step(run("echo one > /work/log"))
    last = await env.truncate(limit)
    assert (last.step_type, last.discount, env.truncated_by) == ("LAST", 1.0, limit)
    assert [one.name for one in env.report().stages] == ["one"]


@pytest.mark.parametrize(
    ("steps", "more", "strategy"),
    [(3, "", "mean"), (3, "", "final"), (None, "[steps.agent]\ntimeout_sec = 1\n", "mean")],
)
async def test_no_reward_where_the_last_stage_is_not_verified(
    make_environment: Any, make_steps: MakeSteps, steps: int | None, more: str, strategy: str
) -> None:
    task = make_steps(f"multi_step_reward_strategy = '{strategy}'\n" + TWO_STEPS + more)
    env = make_environment(task, limits=EpisodeLimits(steps=steps, verify_on_truncation=False))
    await env.reset()
    await env.step(run("echo one > /work/log"))
    assert (await env.step(SUBMIT)).mid()
    last = await env.step(run("sleep 30" if more else "true"))
    assert (last.step_type, last.reward, last.discount, env.verdict) == ("LAST", None, 1.0, None)
    assert [one.reward for one in env.report().stages] == [1.0, None]


async def test_an_episode_ends_with_a_verifier_that_fails(make_environment: Any, make_steps: MakeSteps) -> None:
    env = make_environment(make_steps(files={"steps/one/tests/test.sh": "#!/bin/sh\ntrue\n"}))
    await env.reset()
    with pytest.raises(VerifierError):
        await env.step(SUBMIT)
    assert not env.report().has_container


async def test_every_agent_has_to_ask(make_environment: Any, make_steps: MakeSteps) -> None:
    asked = []

    class OnlyOnce:
        def __init__(self, llm_client: Any) -> None:
            self._llm = llm_client

        async def run(self, task: str) -> None:
            if not asked:
                asked.append(task)
                await self._llm(ask(task))

    def factory(*, container: Any, llm_client: Any) -> OnlyOnce:
        return OnlyOnce(llm_client)

    env = make_environment(make_steps(files={"steps/one/tests/test.sh": PASSES}), agent=factory)
    await env.reset()
    with pytest.raises(NoRequestError):
        await env.step(SUBMIT)


SEPARATE = "[verifier]\nenvironment_mode = 'separate'\n"


async def test_a_verifier_of_its_own_sees_nothing_of_the_agents(
    make_environment: Any, make_task: Any, tmp_path: Path
) -> None:
    test = (
        "#!/bin/sh\n[ -e /answer ] && exit\n"
        'echo "$([ -e /answer ] || echo 1)" > /logs/verifier/reward.txt; id -u > /logs/verifier/id\n'
    )
    env = make_environment(make_task(toml=SEPARATE, test=test), output_dir=tmp_path / "out")
    await env.reset()
    await env.step(run("echo 42 > /answer"))
    last = await env.step(SUBMIT)
    assert last.reward == 1.0
    assert (tmp_path / "out" / "verifier" / "id").exists()


async def test_the_limit_of_a_verifier_of_its_own(make_environment: Any, make_task: Any) -> None:
    env = make_environment(
        make_task(toml=SEPARATE, test="#!/bin/sh\nsleep 300\n"),
        limits=EpisodeLimits(time=TimeLimits(verifier_timeout_sec=0.5)),
    )
    await env.reset()
    with pytest.raises(VerifierTimeoutError):
        await env.step(SUBMIT)
