"""What a container is given, and what it is not."""

import asyncio
import contextlib
from typing import Any

import docker
import pytest

from ares_exp.containers.container import Container, ContainerSpec, ExecResult
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.container import DockerContainer
from ares_exp.errors import ContainerError

pytestmark = pytest.mark.docker

IMAGE = "debian:bookworm-slim"
SPEC = ContainerSpec("limited", docker_image=IMAGE)

# https://docs.docker.com/engine/security/#linux-kernel-capabilities, as bits of linux/capability.h
DEFAULT_CAPABILITIES = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))


def host_config(engine: docker.DockerClient, box: Container) -> dict[str, Any]:
    config: dict[str, Any] = engine.api.inspect_container(box.container_name)["HostConfig"]  # type: ignore[attr-defined]
    return config


async def test_limits_are_applied(engine: docker.DockerClient) -> None:
    spec = ContainerSpec("limits", docker_image=IMAGE, cpus=0.5, memory_mb=128)
    async with DockerContainerFactory(pids_limit=77, swap_mb=64)(spec) as box:
        config = host_config(engine, box)
    assert (config["NanoCpus"], config["Memory"], config["MemorySwap"]) == (500_000_000, 128 * 2**20, 192 * 2**20)
    assert config["PidsLimit"] == 77


@pytest.mark.parametrize("no_new_privileges", [False, True])
async def test_container_has_only_default_rights(engine: docker.DockerClient, no_new_privileges: bool) -> None:
    async with DockerContainerFactory(no_new_privileges=no_new_privileges)(SPEC) as box:
        config = host_config(engine, box)
        said = (await box.exec("cat /proc/self/status; ls /var/run/docker.sock /run/docker.sock")).output
    status = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == DEFAULT_CAPABILITIES
    assert status["Seccomp"] == "2"
    assert status["NoNewPrivs"] == str(int(no_new_privileges))
    assert said.count("No such file or directory") == 2
    assert not config["Privileged"]
    assert config["CapAdd"] is config["Binds"] is None
    assert not config["Devices"]
    assert not config["VolumesFrom"]
    assert (config["PidMode"], config["UTSMode"], config["UsernsMode"]) == ("", "", "")
    assert config["IpcMode"] == "private"
    assert (config["SecurityOpt"] or []) == (["no-new-privileges:true"] if no_new_privileges else [])


# No more processes: every command ends in time with a result or with a reason

FACTORY = DockerContainerFactory(pids_limit=64)  # at 64, a process that keeps forking stays in the container
LIMIT_SEC = 3.0
BOUND_SEC = 60.0


@pytest.mark.once
@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_time_limit_kills_all_processes() -> None:
    async with FACTORY(SPEC) as box:
        filled = await box.exec("while :; do sleep 600 & done", timeout_sec=LIMIT_SEC)
        assert filled.timed_out
        assert filled.exit_code is None
        assert "Resource temporarily unavailable" in filled.output
        async with asyncio.timeout(BOUND_SEC):
            following = await once_there_is_room(box, "cat /proc/[0-9]*/stat | grep -c '(sleep) [^Z]'; echo next")
        assert following.output.endswith("0\nnext\n")
        assert following.exit_code == 0


# For three seconds it starts as many processes as possible; they end three seconds later without help from other
# commands: if all idle shells are gone, no process in the container can kill another.
TAKES_ALL = "end=$((SECONDS + 3)); while [ $SECONDS -lt $end ]; do sleep 3 & done"


@pytest.mark.once
@pytest.mark.timeout(300)
async def test_commands_recover_from_a_full_process_table() -> None:
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
