"""Health checks in a real container."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.errors import HealthcheckError
from ares_exp.tasks.environment_section import HealthCheck
from ares_exp.tasks.verification.step_setup import await_health, whole_seconds

pytestmark = pytest.mark.local

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
async def test_so_many_failures_are_too_many(container: Container, retries: int, times: int) -> None:
    with pytest.raises(HealthcheckError, match=rf"failed {times} times, the last time with exit code 7: not yet"):
        await await_health(check(f"{COUNT} echo not yet; exit 7", retries=retries), container)
    assert await runs(container) == times


async def test_a_command_that_takes_too_long_is_no_failed_attempt(container: Container) -> None:
    with pytest.raises(HealthcheckError, match=r"did not end within its limit of 1\.9 s"):
        await await_health(check(f"{COUNT} sleep 60", timeout_sec=1.9, retries=5), container)
    assert await runs(container) == 1


def test_time_limits_are_whole_seconds() -> None:
    limits = {1.9: 1.0, 30.0: 30.0, 1.0: 1.0, 0.9: None, 0.0: None, -5.0: None, float("inf"): None}
    assert {limit: whole_seconds(limit) for limit in limits} == limits
