"""Steps and health checks of tasks in a real container."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import HealthcheckError, StepSetupError
from ares_exp.tasks.environment_section import HealthCheck
from ares_exp.tasks.harbor_task import HarborTask, load_task
from ares_exp.tasks.task_contract import Verdict
from ares_exp.tasks.verification.step_setup import await_health, whole_seconds

pytestmark = pytest.mark.local

MakeTask = Callable[..., Path]
STEPS = "[[steps]]\nname = 'one'\n{one}\n[[steps]]\nname = 'two'\n"
INSTRUCTIONS = {"steps/one/instruction.md": "One.", "steps/two/instruction.md": "Two.", "instruction.md": None}


@asynccontextmanager
async def set_up(task: HarborTask) -> AsyncIterator[Container]:
    async with LocalContainerFactory()(task.container_spec) as box:
        await task.set_up(box)
        yield box


def load(make_task: MakeTask, *, one: str = "", **files: str) -> HarborTask:
    return load_task(make_task(toml=STEPS.format(one=one), files={**INSTRUCTIONS, **files}))


async def test_failing_setup_script_stops_the_step(make_task: MakeTask) -> None:
    task = load(make_task, one="healthcheck.command = 'touch /checked'",
                **{"steps/one/workdir/setup.sh": "echo no luck >&2; exit 9"})  # fmt: skip
    async with set_up(task) as box:
        with pytest.raises(StepSetupError, match=r"(?s)setup\.sh of step 'one' gave exit code 9; .*\nno luck"):
            await task.stages[0].start(box)
        assert (await box.exec("ls /checked")).exit_code != 0


@pytest.mark.parametrize(
    ("least", "rewards", "goes_on"),
    [
        ("", {"reward": 0.0}, True),
        ("min_reward = 0.5", {"reward": 0.5}, True),
        ("min_reward = 0.5", {"reward": 0.4}, False),
        ("min_reward = 0.5", {"other": 1.0}, False),
        ("min_reward = {a = 1, b = 0}", {"a": 1, "b": 0.5}, True),
        ("min_reward = {a = 1, b = 0}", {"a": 1}, False),
    ],
)
def test_min_reward_decides_whether_to_continue(
    make_task: MakeTask, least: str, rewards: dict[str, float], goes_on: bool
) -> None:
    assert load(make_task, one=least).stages[0].goes_on(Verdict(1.0, rewards)) is goes_on


COUNT = "echo x >> /count; "  # notes that it was run


@pytest.fixture
async def container() -> AsyncIterator[Container]:
    async with LocalContainerFactory()(ContainerSpec("health-check")) as box:
        yield box


async def runs(container: Container) -> int:
    return int((await container.exec("wc -l < /count")).output)


def check(command: str, **more: object) -> HealthCheck:
    return HealthCheck.model_validate({"interval_sec": 0.01, "start_interval_sec": 0.01, "command": command, **more})


@pytest.mark.parametrize(("retries", "times"), [(3, 3), (-2, 1)])
async def test_health_check_fails_after_its_retries(container: Container, retries: int, times: int) -> None:
    with pytest.raises(HealthcheckError, match=rf"failed {times} times, the last time with exit code 7: not yet"):
        await await_health(check(f"{COUNT} echo not yet; exit 7", retries=retries), container)
    assert await runs(container) == times


async def test_health_check_timeout_is_not_retried(container: Container) -> None:
    with pytest.raises(HealthcheckError, match=r"did not end within its limit of 1\.9 s"):
        await await_health(check(f"{COUNT} sleep 60", timeout_sec=1.9, retries=5), container)
    assert await runs(container) == 1


def test_time_limits_are_rounded_to_seconds() -> None:
    limits = {1.9: 1.0, 30.0: 30.0, 1.0: 1.0, 0.9: None, 0.0: None, -5.0: None, float("inf"): None}
    assert {limit: whole_seconds(limit) for limit in limits} == limits
