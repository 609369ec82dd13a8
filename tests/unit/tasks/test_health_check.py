"""Health checks in a real container."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import ContainerError, HealthcheckError
from ares_exp.tasks.environment_section import HealthCheck
from ares_exp.tasks.harbor_task import load_task
from ares_exp.tasks.verification.health_check import await_health, whole_seconds

pytestmark = pytest.mark.local

MakeTask = Callable[..., Path]
COUNT = "echo x >> /count; "  # notes that it was run


@pytest.fixture
async def container() -> AsyncIterator[Container]:
    async with LocalContainerFactory()(ContainerSpec("health-check")) as box:
        yield box


async def runs(container: Container) -> int:
    return int((await container.exec("wc -l < /count")).output)


def check(command: str, **more: object) -> HealthCheck:
    return HealthCheck.model_validate({"interval_sec": 0.01, "start_interval_sec": 0.01, "command": command, **more})


async def test_it_is_run_until_it_succeeds(container: Container) -> None:
    await await_health(check(f"{COUNT} [ $(wc -l < /count) -eq 3 ]"), container)
    assert await runs(container) == 3


@pytest.mark.parametrize(("retries", "times"), [(3, 3), (1, 1), (0, 1), (-2, 1)])
async def test_so_many_failures_are_too_many(container: Container, retries: int, times: int) -> None:
    with pytest.raises(HealthcheckError, match=rf"failed {times} times, the last time with exit code 7: not yet"):
        await await_health(check(f"{COUNT} echo not yet; exit 7", retries=retries), container)
    assert await runs(container) == times


async def test_failures_in_the_start_period_do_not_count(container: Container) -> None:
    await await_health(check(f"{COUNT} [ $(wc -l < /count) -eq 5 ]", retries=1, start_period_sec=60), container)
    assert await runs(container) == 5
    with pytest.raises(HealthcheckError, match="failed 1 times"):
        await await_health(check("exit 1", retries=1, start_period_sec=0.1), container)


async def test_a_command_that_takes_too_long_is_no_failed_attempt(container: Container) -> None:
    with pytest.raises(HealthcheckError, match=r"did not end within its limit of 1\.9 s"):
        await await_health(check(f"{COUNT} sleep 60", timeout_sec=1.9, retries=5), container)
    assert await runs(container) == 1


def test_time_limits_are_whole_seconds() -> None:
    limits = {1.9: 1.0, 30.0: 30.0, 1.0: 1.0, 0.9: None, 0.0: None, -5.0: None, float("inf"): None}
    assert {limit: whole_seconds(limit) for limit in limits} == limits


@pytest.mark.root
async def test_it_is_run_as_somebody(container: Container) -> None:
    await await_health(check("[ $(id -u) -eq 1234 ]", retries=1), container, user=1234)


async def test_the_environments_own_comes_after_its_files_and_before_the_agent(make_task: MakeTask) -> None:
    toml = "[agent]\nuser = 1234\n[environment.healthcheck]\ncommand = 'touch /root/healthy'"
    task = load_task(make_task(toml=toml))
    async with LocalContainerFactory()(task.container_spec) as box:
        await task.set_up(box)
        assert (await box.exec("stat -c %u /root/healthy && ls -d /logs/agent")).output == "0\n/logs/agent\n"


async def test_one_that_fails_stops_the_set_up(make_task: MakeTask) -> None:
    toml = "[environment.healthcheck]\ncommand = 'exit 3'\ninterval_sec = 0.01"
    task = load_task(make_task(toml=toml))
    async with LocalContainerFactory()(task.container_spec) as box:
        with pytest.raises(ContainerError, match=r"`exit 3` failed 3 times, .* exit code 3: no output"):
            await task.set_up(box)
