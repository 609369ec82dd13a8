"""Features of Harbor tasks: several steps, and forwarded ports as an agent opens them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ares_exp import errors
from ares_exp.agents.runtime.agent_runtime import AgentRuntime
from ares_exp.containers.activity import Activity
from ares_exp.environments.agent_host import HostedContainer
from ares_exp.environments.episode_limits import EpisodeLimits
from ares_exp.tasks.harbor_task import HarborTask, load_task
from ares_exp.testing.echo_container import RehearsalContainer
from ares_exp.testing.forwarded_port_contract import ForwardedPortContract, Server, echo, greet
from tests.compatibility.case import write_task
from tests.unit.environments.snapshots import SUBMIT, Restore, agent_of, ask, last_message, run, running_boxes, say
from tests.unit.environments.steps import PASSES, TWO_STEPS, MakeSteps

pytestmark = pytest.mark.local

SKILLS = """FROM debian:bookworm-slim
RUN mkdir -p /skills/pdf && printf -- '---\\ndescription: Reads PDFs.\\n---\\n' > /skills/pdf/SKILL.md
"""
STEPS = "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n"
CONVERSATION = json.dumps(
    {
        "agent": {"name": "other", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "system", "message": "Be brief."},
            {"step_id": 2, "source": "user", "message": "What is asked?"},
            {"step_id": 3, "source": "agent", "message": "The response."},
        ],
    }
)
Make = Callable[..., HarborTask]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a task from its files and loads it."""

    def make(toml: str, **files: str) -> HarborTask:
        return load_task(write_task(tmp_path / "featured", {"task.toml": toml, "instruction.md": "Go on.", **files}))

    return make


def conversation(env: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in env.time_step.observation.messages]


async def test_task_provides_conversation_and_skills(
    make_environment: Any, make: Make, restore: Restore, store: Path
) -> None:
    toml = "[environment]\nskills_dir = '/skills'\n"
    env = make_environment(make(toml, **{"environment/Dockerfile": SKILLS, "trajectory.json": CONVERSATION}))
    first = await env.reset()
    assert conversation(env)[:2] == [("user", "What is asked?"), ("assistant", "The response.")]
    role, told = conversation(env)[2]
    assert role == "user"
    assert "<task>\nGo on.\n</task>" in told
    assert told.endswith("- /skills/pdf/SKILL.md (pdf): Reads PDFs.\n")
    assert "Be brief." not in first.observation.system_prompt
    await env.step(run("echo said"))
    again = await restore(await env.export_state(store))
    assert again.time_step == env.time_step
    await again.step(run("head -n 2 /skills/pdf/SKILL.md"))
    assert "Reads PDFs." in last_message(again)
    assert (await again.step(SUBMIT)).reward == 1.0


async def test_empty_skills_directory_is_not_mentioned(make_environment: Any, make: Make) -> None:
    env = make_environment(make("[environment]\nskills_dir = '/no/such'\n"))
    await env.reset()
    ((_, told),) = conversation(env)
    assert "kill" not in told


async def test_conversation_is_only_for_the_first_step(
    make_environment: Any, make: Make, restore: Restore, store: Path
) -> None:
    files = {f"steps/{name}/instruction.md": f"Do {name}." for name in ("one", "two")}
    env = make_environment(make(STEPS, **files, **{"steps/one/trajectory.json": CONVERSATION}))
    await env.reset()
    assert len(conversation(env)) == 3
    await env.step(SUBMIT)
    assert len(conversation(env)) == 1
    again = await restore(await env.export_state(store))
    assert again.past_steps[0].time_step == env.past_steps[0].time_step
    assert conversation(again) == conversation(env)
    assert (await again.step(SUBMIT)).reward == 1.0


async def test_agent_without_set_context_is_refused(make_environment: Any, make: Make) -> None:
    async def asks(container: Any, llm: Any) -> None:
        await llm(ask())

    env = make_environment(make("", **{"trajectory.json": CONVERSATION}), agent=agent_of(asks))
    with pytest.raises(errors.AgentError, match=r"has no set_context\(\)"):
        await env.reset()
    assert not running_boxes()


async def test_extra_instructions_survive_a_snapshot(
    make_environment: Any, make: Make, restore: Restore, store: Path
) -> None:
    env = make_environment(make("").with_extra_instructions(["Hurry."]))
    await env.reset()
    assert "Go on.\n\nHurry.\n</task>" in conversation(env)[0][1]
    again = await restore(await env.export_state(store))
    assert conversation(again) == conversation(env)


async def opens(container: Any, llm: Any) -> None:
    """Says what comes back by a forwarded port, which is no command."""
    async with ForwardedPortContract().opened(container) as (port, _):
        result = await container.exec(greet(port))
    await llm(ask(result.output))


async def test_agent_opens_a_forwarded_port(make_environment: Any) -> None:
    factory = agent_of(opens)
    factory.deterministic = False
    env = make_environment(agent=factory)
    first = await env.reset()
    assert first.observation.messages[0]["content"] == "hello\n"
    assert (await env.step(say("done"))).last()


async def test_deterministic_agent_cannot_open_ports(make_environment: Any) -> None:
    with pytest.raises(errors.AgentError, match=r"not in the journal.*deterministic = False"):
        await make_environment(agent=agent_of(opens)).reset()


async def test_container_without_forwarded_ports_is_refused() -> None:
    runtime = AgentRuntime(None, on_llm=lambda _: None, on_change=lambda: None)
    plain: Any = RehearsalContainer()
    hosted = HostedContainer(plain, runtime, user=None, shell=None, env={}, limit_commands=True, activity=Activity())
    with pytest.raises(errors.PortForwardingError, match=r"RehearsalContainer.*Use container=local"):
        await hosted.forward_port(Server(echo))


@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_episode_limits_cover_all_stages(make_environment: Any, make_steps: MakeSteps, steps: int) -> None:
    env = make_environment(make_steps(), limits=EpisodeLimits(steps=steps))
    await env.reset()
    for reply in (run("echo one > /work/log"), SUBMIT, run("true"), SUBMIT)[:steps]:
        step = await env.step(reply)
    assert (step.step_type, step.discount, env.truncated_by) == ("LAST", 1.0, "steps")
    assert step.reward == {1: 0.5, 2: 0.5, 3: 0.75}[steps]


@pytest.mark.parametrize("limit", ["steps", "time"])
async def test_truncated_episode_starts_no_further_stage(
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
async def test_unverified_last_stage_gives_no_reward(
    make_environment: Any, make_steps: MakeSteps, steps: int | None, more: str, strategy: str
) -> None:
    task = make_steps(f"multi_step_reward_strategy = '{strategy}'\n" + TWO_STEPS + more)
    env = make_environment(task, limits=EpisodeLimits(steps=steps, verify_on_truncation=False))
    await env.reset()
    await env.step(run("echo one > /work/log"))
    assert (await env.step(SUBMIT)).mid()
    last = await env.step(run("sleep 30" if more else "true"))
    assert (last.step_type, last.reward, last.discount, env.verdict) == ("LAST", None, 1.0, None)
    assert [(one.reward, one.num_steps) for one in env.report().stages] == [(1.0, 2), (None, 1)]


async def test_every_agent_must_make_a_request(make_environment: Any, make_steps: MakeSteps) -> None:
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
    with pytest.raises(errors.NoRequestError):
        await env.step(SUBMIT)
