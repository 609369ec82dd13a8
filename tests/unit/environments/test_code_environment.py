"""The code environment in the real local sandbox."""

import asyncio
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ares_exp import errors
from ares_exp.agents.shell_agent import ShellAgentFactory
from ares_exp.containers.container import ContainerSpec, Mount
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.environment import truncation
from ares_exp.environments.code_environment import CodeEnvironment
from ares_exp.environments.episode_limits import EpisodeLimits, TimeLimits
from ares_exp.environments.source import EpisodeParts
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.policies.oracle import OraclePolicy
from ares_exp.rollout import run_episode
from tests.unit.environments.snapshots import SUBMIT, agent_of, ask, run, running_boxes

pytestmark = pytest.mark.local


async def test_episode_runs_from_reset_to_termination(make_environment: Any) -> None:
    env = make_environment()
    first = await env.reset()
    assert first.first()
    assert first is env.time_step
    assert "Write 42" in first.observation.messages[0]["content"]
    middle = await env.step(run("echo 42 > /answer; echo written; exit 3"))
    assert (middle.step_type, middle.reward, middle.discount) == ("MID", 0.0, 1.0)
    shown = middle.observation.messages[-1]["content"]
    assert "written" in shown
    assert "<exit_code>3</exit_code>" in shown
    last = await env.step(SUBMIT)
    assert (last.step_type, last.reward, last.discount, last.observation) == ("LAST", 1.0, 0.0, None)
    assert env.step_count == 2
    assert env.current_task.name == "task"
    assert set(env.report().phase_sec) == {"start", "agent", "verify"}


async def test_container_starts_with_mounts_of_the_agent(make_task: Any, tmp_path: Path) -> None:
    """And so it is checked beforehand; the oracle, who needs no agent's program, does without."""
    mount = Mount(tmp_path, "/opt/program", "sha256:0")

    class Factory(ShellAgentFactory):
        mounts = (mount,)

    class Refusing(LocalContainerFactory):
        def __call__(self, spec: ContainerSpec) -> Any:
            raise errors.ContainerStartError(f"asked for {[one.target for one in spec.mounts]}")

    task, parts = make_task(), EpisodeParts(LocalContainerFactory(), Factory(), EpisodeLimits(), seed=0)
    for is_oracle, expected in ((False, (mount,)), (True, ())):
        asked = replace(parts, container_factory=Refusing(), provide_solution=is_oracle)
        assert [spec.mounts for spec in asked.container_specs(task)] == [expected]
        async with CodeEnvironment.for_episode(task, asked) as env:
            with pytest.raises(errors.ContainerStartError, match=re.escape(str([one.target for one in expected]))):
                await env.reset()


async def test_report_shows_the_current_phase(make_environment: Any) -> None:
    env = make_environment()
    assert (env.report().phase, env.report().has_container) == (None, False)
    resetting = asyncio.create_task(env.reset())
    await asyncio.sleep(0)
    assert (env.report().phase, env.report().has_container) == ("start", True)
    await resetting
    assert (env.report().phase, env.report().has_container) == (None, True)
    stepping = asyncio.create_task(env.step(run("true")))
    await asyncio.sleep(0)
    assert env.report().phase == "agent"
    await stepping
    await env.close()
    assert (env.report().phase, env.report().has_container) == (None, False)


async def test_reply_without_one_command_is_explained(make_environment: Any) -> None:
    env = make_environment()
    await env.reset()
    none = await env.step(LLMResponse.from_text("no block"))
    assert "found 0" in none.observation.messages[-1]["content"]
    two = await env.step(LLMResponse.from_text("```bash\necho a > /a\n```\n```bash\necho b\n```\n"))
    assert "found 2" in two.observation.messages[-1]["content"]
    after = await env.step(run("ls /a"))
    assert "No such file" in after.observation.messages[-1]["content"]
    assert env.report().format_errors == 2
    nul = await env.step(run("echo \0"))
    assert "without NUL characters" in nul.observation.messages[-1]["content"]
    assert "on" in (await env.step(run("echo on"))).observation.messages[-1]["content"]


async def test_long_output_shows_head_and_tail(make_environment: Any) -> None:
    env = make_environment()
    await env.reset()
    shown = (await env.step(run("seq 1 100000"))).observation.messages[-1]["content"]
    assert len(shown) < 11_000
    assert "\n1\n2\n3\n" in shown
    assert "99999\n100000\n" in shown
    assert "<elided_chars>578895</elided_chars>" in shown


async def test_command_timeout_is_reported_with_output(make_environment: Any) -> None:
    env = make_environment(agent=ShellAgentFactory(command_timeout_sec=1.5))
    await env.reset()
    shown = (await env.step(run("echo started; sleep 60"))).observation.messages[-1]["content"]
    assert "stopped after 1.5 seconds" in shown
    assert "started" in shown


@pytest.mark.parametrize(("verify", "reward"), [(True, 1.0), (False, None)])
async def test_truncate_verifies_like_a_limit(make_environment: Any, verify: bool, reward: float | None) -> None:
    env = make_environment(limits=EpisodeLimits(verify_on_truncation=verify))
    with pytest.raises(errors.EpisodeStateError, match="has not been reset"):
        await env.truncate("cost")
    await env.reset()
    await env.step(run("echo 42 > /answer"))
    last = await env.truncate("cost")
    assert (last, env.time_step) == (truncation(reward), last)
    report = env.report()
    assert (report.truncated_by, report.has_container, env.step_count) == ("cost", False, 1)
    with pytest.raises(errors.EpisodeStateError, match="has ended its episode"):
        await env.step(SUBMIT)


async def test_finish_on_the_last_step_is_termination(make_environment: Any) -> None:
    env = make_environment(limits=EpisodeLimits(steps=1))
    await env.reset()
    last = await env.step(SUBMIT)
    assert (last.discount, env.truncated_by) == (0.0, None)


@pytest.mark.parametrize("limit", [{"steps": 2}, {"tokens": 100}, {"cost": 0.5}])
async def test_limits_truncate_and_verify(make_environment: Any, limit: dict[str, Any]) -> None:
    env = make_environment(limits=EpisodeLimits(**limit))
    await env.reset()
    assert (await env.step(run("echo 42 > /answer", usage=Usage(40, 10), cost=0.25))).mid()
    last = await env.step(run("true", usage=Usage(40, 10), cost=0.25))
    assert (last.step_type, last.reward, last.discount) == ("LAST", 1.0, 1.0)
    assert [env.truncated_by] == [*limit]


async def test_response_after_the_time_limit_is_ignored(make_environment: Any) -> None:
    env = make_environment(limits=EpisodeLimits(time=TimeLimits(agent_timeout_sec=1.0)))
    await env.reset()
    await asyncio.sleep(1.1)
    last = await env.step(run("echo 42 > /answer"))
    assert (last.reward, env.truncated_by, env.step_count) == (0.0, "time", 1)


async def test_missing_response_in_time_truncates_and_verifies(make_environment: Any) -> None:
    env = make_environment(limits=EpisodeLimits(time=TimeLimits(agent_timeout_sec=30.0)))
    await env.reset()
    assert 20 < env.time_left_sec <= 30
    last = await env.step(None)
    assert (last.reward, last.discount, env.truncated_by, env.step_count) == (0.0, 1.0, "time", 1)
    await env.close()
    assert env.time_step is last


async def test_agent_that_returned_in_time_is_not_truncated(make_environment: Any) -> None:
    async def hasty(container: Any, llm: Any) -> None:
        asking = asyncio.create_task(llm(ask()))
        await asyncio.sleep(0.1)
        asking.cancel()

    env = make_environment(agent=agent_of(hasty), limits=EpisodeLimits(time=TimeLimits(agent_timeout_sec=1.0)))
    await env.reset()
    await asyncio.sleep(1.2)
    last = await env.step(SUBMIT)
    assert (last.discount, env.truncated_by) == (0.0, None)


async def test_background_work_is_blocked_during_verification(make_environment: Any, make_task: Any) -> None:
    refused: list[str] = []

    async def leaves_a_task(container: Any, llm: Any) -> None:
        async def cheat() -> None:
            for _ in range(100):
                try:
                    await container.exec("echo 42 > /answer")
                except errors.EpisodeStateError as error:
                    refused.append(str(error))
                    return
                await asyncio.sleep(0.02)

        tasks.append(asyncio.create_task(cheat()))
        await llm(ask())
        await container.exec("rm -f /answer")

    tasks: list[asyncio.Task[None]] = []
    test = "#!/bin/sh\nrm -f /answer; sleep 0.5\n[ -e /answer ] && r=1 || r=0\necho $r > /logs/verifier/reward.txt\n"
    env = make_environment(make_task(test=test), agent=agent_of(leaves_a_task))
    await env.reset()
    assert (await env.step(SUBMIT)).reward == 0.0
    assert [task.done() for task in tasks] == [True]


async def test_agent_ignoring_cancellation_loses_its_access(make_environment: Any) -> None:
    refused = asyncio.Event()

    async def stubborn(container: Any, llm: Any) -> None:
        await llm(ask())
        while True:
            try:
                await container.exec("sleep 60")
            except asyncio.CancelledError:
                continue
            except errors.EpisodeStateError:
                refused.set()
                return

    env = make_environment(agent=agent_of(stubborn), limits=EpisodeLimits(time=TimeLimits(agent_timeout_sec=1.0)))
    await env.reset()
    assert (await env.step(SUBMIT)).discount == 1.0
    assert refused.is_set()


async def test_close_during_reset_releases_everything(make_environment: Any) -> None:
    env = make_environment()
    resetting = asyncio.create_task(env.reset())
    await asyncio.sleep(0.01)
    await env.close()
    with pytest.raises((errors.EpisodeStateError, errors.ContainerError)):
        await resetting
    assert env.time_step is None


async def test_choice_of_tasks_is_seeded(make_environment: Any, make_task: Any) -> None:
    tasks = [make_task(f"task-{number}") for number in range(5)]

    async def order(**more: Any) -> list[str]:
        env, names = make_environment(*tasks, **more), []
        for _ in range(4):
            await env.reset()
            names.append(env.current_task.name)
        await env.close()
        return names

    first = await order(seed=1)
    assert first == await order(seed=1)
    assert first != await order(seed=2)


async def test_task_can_be_selected(make_environment: Any, make_task: Any) -> None:
    env = make_environment(make_task("a"), make_task("b"))
    for wanted, name in ((1, "b"), ("a", "a")):
        await env.reset(options={"task": wanted})
        assert env.current_task.name == name
    for options in ({"task": "c"}, {"task": 2}, {"tsak": "a"}):
        with pytest.raises(errors.ConfigError):
            await env.reset(options=options)


@pytest.mark.parametrize(
    ("error", "told"), [(ValueError("oh no"), "ValueError: oh no"), (SystemExit(3), r"sys\.exit\(3\)")]
)
async def test_agent_that_raises_or_exits_is_an_error(make_environment: Any, error: BaseException, told: str) -> None:
    async def raises(container: Any, llm: Any) -> None:
        await llm(ask())
        raise error

    env = make_environment(agent=agent_of(raises))
    await env.reset()
    with pytest.raises(errors.AgentError, match=told) as caught:
        await env.step(SUBMIT)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"messages": [{"role": "user", "content": "?"}]}, "llm_client to receive an LLMRequest, got dict"),
        ("?", "got str"),
        (LLMRequest("?"), "mappings with a `role`, got '[?]'"),  # type: ignore[arg-type]
        (LLMRequest([{"content": "?"}]), "mappings with a `role`, got .'content'"),
    ],
)
async def test_invalid_request_of_agent_is_explained(make_environment: Any, asked: Any, expected: str) -> None:
    async def asks(container: Any, llm: Any) -> None:
        await llm(asked)

    with pytest.raises(errors.AgentError, match=f"raised TypeError: Expected .*{expected}.*Use LLMRequest"):
        await make_environment(agent=agent_of(asks)).reset()


async def test_agent_without_async_is_explained(make_environment: Any) -> None:
    class Agent:
        def run(self, task: str) -> None: ...

    with pytest.raises(errors.AgentError, match=r"`Agent\.run` to be asynchronous, got NoneType.* `async def`"):
        await make_environment(agent=lambda *, container, llm_client: Agent()).reset()


async def test_agent_without_requests_is_an_error(make_environment: Any) -> None:
    async def silent(container: Any, llm: Any) -> None:
        await container.exec("true")

    with pytest.raises(errors.NoRequestError):
        await make_environment(agent=agent_of(silent)).reset()


async def test_agent_without_a_timely_request_is_an_error(make_environment: Any) -> None:
    async def slow(container: Any, llm: Any) -> None:
        await asyncio.sleep(60)

    env = make_environment(agent=agent_of(slow), limits=EpisodeLimits(time=TimeLimits(agent_timeout_sec=0.3)))
    with pytest.raises(errors.AgentSetupTimeoutError, match=r"0\.3 s"):
        await env.reset()


async def test_pending_requests_start_with_the_observation(make_environment: Any) -> None:
    async def three_at_once(container: Any, llm: Any) -> None:
        await asyncio.gather(*(llm(ask(text)) for text in "abc"))

    env = make_environment(agent=agent_of(three_at_once))
    assert env.pending_requests() == ()
    time_step = await env.reset()
    for waiting in ("abc", "bc", "c"):
        pending = env.pending_requests()
        assert [one.request.messages[0]["content"] for one in pending] == [*waiting]
        assert (pending[0].request, {one.conversation for one in pending}) == (time_step.observation, {"main"})
        assert len({one.call_id for one in pending}) == len(waiting)
        time_step = await env.step(SUBMIT)
    assert (time_step.last(), env.pending_requests()) == (True, ())


async def test_abandoned_call_ignores_its_late_response(make_environment: Any) -> None:
    async def impatient(container: Any, llm: Any) -> None:
        await llm(ask())
        try:
            async with asyncio.timeout(0.05):
                await asyncio.gather(llm(ask()), asyncio.Event().wait())
        except TimeoutError:
            await llm(ask("again"))

    env = make_environment(agent=agent_of(impatient))
    await env.reset()
    assert (await env.step(SUBMIT)).mid()
    await asyncio.sleep(0.2)
    after = await env.step(LLMResponse.from_text("too late for the call that was given up"))
    assert after.observation.messages[0]["content"] == "again"
    assert (await env.step(SUBMIT)).last()


async def test_dead_container_is_an_error(make_environment: Any) -> None:
    env = make_environment()
    await env.reset()
    stepping = asyncio.create_task(env.step(run("sleep 60")))
    await asyncio.sleep(0.3)
    for pid in running_boxes():
        os.kill(int(pid), signal.SIGKILL)
    with pytest.raises(errors.ContainerDiedError):
        await stepping
    [command] = env.activity.commands
    assert (command.command, command.exit_code) == ("sleep 60", None)


async def test_activity_covers_the_last_step(make_environment: Any) -> None:
    async def looks_around(container: Any, llm: Any) -> None:
        await container.exec("true")
        await llm(ask())
        waiting = asyncio.create_task(llm(ask()))  # the next observation, while commands go on
        await container.exec("exit 4")
        await waiting
        await container.exec("sleep 60", timeout_sec=0.2)

    env = make_environment(agent=agent_of(looks_around))
    await env.reset()
    assert [command.command for command in env.activity.commands] == ["true"]
    assert env.activity.container_sec > env.activity.commands[0].duration_sec
    await env.step(SUBMIT)
    await env.step(SUBMIT)
    commands = [(command.command, command.exit_code, command.timed_out) for command in env.activity.commands]
    assert commands[-1] == ("sleep 60", None, True)
    assert ("true", 0, False) not in commands


async def test_irregular_reward_file_is_an_error(make_environment: Any, make_task: Any) -> None:
    env = make_environment(make_task(test="#!/bin/sh\nmkfifo /logs/verifier/reward.txt\n"))
    await env.reset()
    with pytest.raises(errors.RewardFileNotFoundError, match=r"to a regular file\. /logs/\S+ is a fifo\."):
        await env.step(SUBMIT)


async def test_lost_container_is_no_verifier_timeout(
    make_environment: Any, make_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = make_environment(
        make_task(test="#!/bin/sh\nsleep 60\n"), limits=EpisodeLimits(time=TimeLimits(verifier_timeout_sec=0.5))
    )
    await env.reset()
    run_command = env.container.exec

    async def out_of_reach(command: str, **options: Any) -> Any:
        if command == "true":
            raise errors.ContainerLostError("The engine hangs.")
        return await run_command(command, **options)

    monkeypatch.setattr(env.container, "exec", out_of_reach)
    with pytest.raises(errors.ContainerLostError, match="hangs"):
        await env.step(SUBMIT)


async def test_invalid_response_changes_no_state(make_environment: Any) -> None:
    env = make_environment()
    await env.reset()
    with pytest.raises(TypeError, match="receive an LLMResponse, got str"):
        await env.step("ls")
    assert (await env.step(SUBMIT)).reward == 0.0


async def test_oracle_stops_if_the_agent_never_ends(make_environment: Any, make_task: Any) -> None:
    async def asks_forever(container: Any, llm: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": "Go."}]
        while True:
            response = await llm(LLMRequest(messages))
            messages += [{"role": "assistant", "content": response.text}, {"role": "user", "content": "What?"}]

    env = make_environment(make_task(solution="#!/bin/sh\n"), agent=agent_of(asks_forever), provide_solution=True)
    with pytest.raises(errors.PolicyError, match="submitted 3 times, but the agent sent another request"):
        await run_episode(env, OraclePolicy())
    assert env.step_count == 4
