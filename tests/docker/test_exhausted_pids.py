"""A container that may have no more processes: every command ends in time with a result, or is told why not."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from ares_exp.containers.container import ContainerSpec, ExecResult
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.container import DockerContainer
from ares_exp.errors import ContainerError

pytestmark = [pytest.mark.docker, pytest.mark.once, pytest.mark.timeout(300)]

SPEC = ContainerSpec("pids", docker_image="debian:bookworm-slim")
FACTORY = DockerContainerFactory(pids_limit=64)  # at 64, what goes on forking stays in the container
LIMIT_SEC = 3.0
BOUND_SEC = 60.0


@pytest.mark.nightly
async def test_the_time_limit_kills_all_that_was_started() -> None:
    async with FACTORY(SPEC) as box:
        filled = await box.exec("while :; do sleep 600 & done", timeout_sec=LIMIT_SEC)
        assert filled.timed_out
        assert filled.exit_code is None
        assert "Resource temporarily unavailable" in filled.output
        async with asyncio.timeout(BOUND_SEC):
            following = await once_there_is_room(box, "cat /proc/[0-9]*/stat | grep -c '(sleep) [^Z]'; echo next")
        assert following.output.endswith("0\nnext\n")
        assert following.exit_code == 0


# For three seconds it takes whatever process it can get; the last of them is gone three seconds later, whatever became
# of the commands beside it: where all idle shells are gone, nothing in the container can be told to kill anything.
TAKES_ALL = "end=$((SECONDS + 3)); while [ $SECONDS -lt $end ]; do sleep 3 & done"


async def test_commands_beside_what_takes_all_processes() -> None:
    async with FACTORY(SPEC) as box:
        await box.exec(f"(setsid bash -c '{TAKES_ALL}' >/dev/null 2>&1 &)")
        async with asyncio.timeout(BOUND_SEC):
            beside = [box.exec("(true); echo on", timeout_sec=LIMIT_SEC) for _ in range(4)]
            results = await asyncio.gather(*beside, return_exceptions=True)
            results += await asyncio.gather(box.exec("kill -9 -1", timeout_sec=LIMIT_SEC), return_exceptions=True)
        for result in results:
            assert isinstance(result, (ExecResult, ContainerError)), result
        async with asyncio.timeout(BOUND_SEC):
            while not (await once_there_is_room(box, "echo next")).output.endswith("next\n"):
                pass


async def once_there_is_room(box: DockerContainer, command: str) -> ExecResult:
    """Killed processes count until the first process has reaped them, up to a second later: a refusal is fair."""
    while True:
        with contextlib.suppress(ContainerError):
            return await box.exec(command)
