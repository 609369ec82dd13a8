"""One local container: commands, files, users, its start and its end. Runs as root and as an ordinary user."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.local import LocalContainerFactory
from ares_exp.containers.local.cgroup import find_groups
from ares_exp.containers.local.container_directory import folders
from ares_exp.containers.local.isolation import is_privileged
from ares_exp.containers.network_policy import NO_NETWORK, PUBLIC, NetworkPolicy
from ares_exp.errors import (
    ContainerError,
    ContainerStartError,
    EnvironmentStartTimeoutError,
    TaskError,
    TransferError,
    UnsupportedTaskError,
)
from tests.unit.containers.local_containers import local_container, needs_local

pytestmark = needs_local


def traces() -> tuple[list[str], ...]:
    """Container directories of this process, and mounts and cgroups of its containers, on the host."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    directories = [path for folder in folders() for path in folder.glob(f"*ares_exp-box-{os.getpid()}-*")]
    groups = [str(group) for group in find_groups() if f"-{os.getpid()}-" in group.name]
    return list(map(str, directories)), [m for m in mounts if f"ares_exp-box-{os.getpid()}-" in m], groups


def descendants() -> list[str]:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [f"{pid} {Path('/proc', pid, 'cmdline').read_text()}" for pid in children]


async def test_container_leaves_no_traces() -> None:
    before = (traces(), descendants())
    async with local_container() as container:
        await container.exec("(setsid sleep 300 &) ; echo left > /usr/left")
        assert traces() != before[0]
    assert (traces(), descendants()) == before


async def test_first_process_has_only_the_spec_environment() -> None:
    async with local_container(env={"GREETING": "hello"}) as container:
        result = await container.exec("tr '\\0' '\\n' </proc/1/environ | cut -d= -f1 | sort | xargs")
    assert set(result.output.split()) <= {"GREETING", "HOME", "PATH", "PWD", "SHLVL", "_"}
    assert "GREETING" in result.output


async def test_python_runs_and_system_directories_are_writable() -> None:
    async with local_container() as container:
        made = "touch /app-file /etc/x /usr/x /usr/bin/x /usr/local/bin/x /tmp/x /root/x /var/lib/x /opt/x"
        result = await container.exec(
            f"python3 -c 'print(6 * 7)' && mkdir /app /tests /logs && {made} && rm /etc/passwd"
        )
    assert (result.output, result.exit_code) == ("42\n", 0)
    assert not Path("/usr/x").exists()
    assert Path("/etc/passwd").exists()


async def test_signals_are_not_ignored_in_commands() -> None:
    async with local_container() as container:
        assert (await container.exec("grep SigIgn /proc/self/status")).output.split()[1].strip("0") == ""


@pytest.mark.root
async def test_commands_run_as_the_given_user() -> None:
    names = {
        "nobody": "65534:nogroup",
        65534: "65534:nogroup",
        "4242": "4242:root",
        "4242:7": "4242:lp",
        "nobody:daemon": "65534:daemon",
    }
    ask = "echo $(id -u):$(id -gn):$(awk '/CapEff/ {print $2}' /proc/self/status); touch /etc/x || python3 -V"
    async with local_container() as container:
        for user, name in names.items():
            result = await container.exec(ask, user=user)
            assert result.output.startswith(f"{name}:0000000000000000\ntouch: ")
            assert result.exit_code == 0


async def test_unknown_users_are_refused_without_restart() -> None:
    async with local_container() as container:
        for user in ("nobody:no_such_group", "a b", "$(id)", "-x", ""):
            with pytest.raises(ContainerError, match=r"user|shell"):
                await container.exec("true", user=user)
        assert (await container.exec("echo on")).output == "on\n"
    with pytest.raises(ContainerStartError):
        await container.start()


async def test_failed_transfers_report_the_reason(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"touch /pwned\n" * 300_000)
    async with local_container() as container:
        with pytest.raises(TransferError, match=r"/proc/sys/x"):
            await container.upload(tmp_path / "big", "/proc/sys/x/y")
        await container.exec("mkdir -p /full/big/x")
        with pytest.raises(TransferError, match=r"/full/big"):
            await container.upload(tmp_path / "big", "/full/big")
        # The rest of an archive that nobody wanted must not be run by the shell that received it.
        assert (await container.exec("ls /pwned")).exit_code != 0


async def test_late_start_fails_and_leaves_no_traces(tmp_path: Path) -> None:
    before = (traces(), descendants())
    (tmp_path / "Dockerfile").write_text("FROM scratch\nRUN sleep 60\n")
    with pytest.raises(EnvironmentStartTimeoutError, match=r"0\.4 s"):
        await local_container(tmp_path, start_timeout_sec=0.4).start()
    assert (traces(), descendants()) == before


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.010, 0.030])
async def test_cancelled_start_leaves_no_traces(tmp_path: Path, delay: float) -> None:
    before = (traces(), descendants())
    (tmp_path / "Dockerfile").write_text("FROM x\nRUN sleep 60\n")
    task = asyncio.create_task(local_container(tmp_path).start())
    await asyncio.sleep(delay)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (traces(), descendants()) == before


async def test_cancelled_and_stopped_boxes_leave_no_descriptors() -> None:
    async def live() -> None:
        async with local_container() as container:
            await asyncio.gather(*(container.exec("true") for _ in range(4)))

    await live()
    before, children = set(os.listdir("/proc/self/fd")), descendants()  # noqa: PTH208
    for step in range(8):
        task = asyncio.create_task(live())
        await asyncio.sleep(0.005 * step)
        task.cancel()
        await asyncio.wait({task})
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    assert descendants() == children


async def test_cancelled_download_stops_writing(tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    async with local_container() as container:
        await container.exec("mkdir /many; cd /many; seq 3000 | xargs touch")
        copying = asyncio.create_task(container.download("/many", into))
        async with asyncio.timeout(20):
            while not list(into.iterdir()):  # noqa: ASYNC110 (another thread)
                await asyncio.sleep(0)
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert len(list(into.iterdir())) in (0, 3000)  # what is being unpacked is in a directory of its own there


async def test_stop_closes_forgotten_streams() -> None:
    async with local_container() as container:
        forgotten = await container._process.open_shell("root")
        (await container._process.open_shell("root")).close()
    assert forgotten.is_closed


def test_unsupported_specs_are_refused(tmp_path: Path) -> None:
    check = LocalContainerFactory().check
    with pytest.raises(UnsupportedTaskError, match="GPU"):
        check(ContainerSpec(name="t", gpus=1))
    with pytest.raises(UnsupportedTaskError, match="container=docker"):
        check(ContainerSpec(name="t", docker_image="debian"))
    with pytest.raises(TaskError, match="Dockerfile"):
        check(ContainerSpec(name="t", context_dir=tmp_path))
    (tmp_path / "Dockerfile").write_text("FROM x\n")
    check(ContainerSpec(name="t", docker_image="debian", context_dir=tmp_path))
    with pytest.raises(
        UnsupportedTaskError, match=r"docker-compose\.yaml: container=local does not support compose files"
    ):
        check(ContainerSpec(name="t", context_dir=tmp_path, compose_file=tmp_path / "docker-compose.yaml"))


MIXED = [
    {"network": NetworkPolicy("allowlist", frozenset({"a.example"}))},
    {"network": NO_NETWORK, "phase_networks": frozenset({PUBLIC})},
]


@pytest.mark.parametrize("networks", MIXED)
async def test_unenforceable_networks_are_refused(networks: dict[str, Any]) -> None:
    spec = ContainerSpec("task", **networks)
    with pytest.raises(UnsupportedTaskError, match=r"task: container=local supports neither allowlists.*=no-network"):
        LocalContainerFactory(network="public").check(spec)
    # None at all is less than any of them asks for; but who lists hosts will miss them.
    told = (
        ["task: container=local runs the task without a network, so it cannot reach its allowed_hosts"]
        if spec.network.allowed_hosts
        else []
    )
    assert LocalContainerFactory().check(spec) == told
    async with LocalContainerFactory()(spec) as container:
        for policy in spec.networks:
            await container.set_network(policy)
            assert (await container.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).output.split() == ["lo"]


@pytest.mark.parametrize(
    ("users", "refused"),
    [({"root"}, ""), ({0, "0:0"}, ""), ({"nobody"}, "nobody"), ({"root", 1234, "nobody"}, "1234, nobody")],
)
def test_unsupported_users_are_refused_before_start(users: set[str | int], refused: str) -> None:
    spec = ContainerSpec("task", users=frozenset(users))
    if is_privileged() or not refused:
        assert LocalContainerFactory().check(spec) == []
    else:
        with pytest.raises(
            UnsupportedTaskError, match=rf"task: the task runs commands as {refused}\. .*container=docker"
        ):
            LocalContainerFactory().check(spec)
