"""Forwarded ports of Docker containers, and directories of the host that they see."""

import asyncio
import contextlib
import functools
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from ares_exp.containers.container import ContainerFactory, ContainerSpec, Mount
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.leftovers import KEPT_VOLUME
from ares_exp.containers.docker.mounts import volume_name
from ares_exp.containers.filesystem.delta import StoredChanges
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.containers.network_policy import NO_NETWORK
from ares_exp.errors import AgentInstallError, PortForwardingError, UnsupportedTaskError
from ares_exp.testing.forwarded_port_contract import (
    ForwardedPortContract,
    RelayedForwardedPortContract,
    Server,
    echo,
    greet,
)
from tests.docker.compose_tasks import IMAGE, compose_spec, needs_compose
from tests.docker.engine_forwarder import forwarded_engine
from tests.killed_forwarded_port import killed_forwarded_port

pytestmark = [pytest.mark.docker, pytest.mark.once]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@pytest.mark.root
class TestDockerForwardedPorts(ForwardedPortContract):
    by_night = frozenset(
        {
            "test_excess_connection_waits_or_is_refused",
            "test_stalled_connection_does_not_block_others",
            "test_each_direction_can_be_closed",
            "test_reset_by_either_side_closes_both",
            "test_command_time_limit_does_not_affect_port",
            "test_megabytes_pass_each_way",
            "test_cancelled_opening_releases_the_port",
        }
    )
    """Cases outside the container: the daily run has them for local containers."""

    @pytest.fixture
    def factory(self) -> ContainerFactory:
        return DockerContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("forwarded_ports", docker_image="debian:bookworm-slim", network=NO_NETWORK)


class TestRelayedDockerForwardedPorts(RelayedForwardedPortContract):
    """An engine elsewhere: its containers have no address here, and an image of Debian has perl."""

    by_night = frozenset(
        {
            "test_many_connections_are_served_concurrently",
            "test_excess_connection_waits_or_is_refused",
            "test_each_direction_can_be_closed",
            "test_reset_by_either_side_closes_both",
            "test_failing_server_closes_the_connection",
            "test_command_time_limit_does_not_affect_port",
            "test_occupied_port_is_avoided",
            "test_stalled_connection_does_not_block_others",
            "test_stop_during_opening_does_not_hang",
            "test_cancelled_opening_releases_the_port",
            "test_megabytes_pass_each_way",
        }
    )
    """The behaviour that all relays share; local containers run it in perl, too."""

    networks = frozenset({"no-network", "public"})

    @pytest.fixture
    async def factory(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ContainerFactory]:
        async with forwarded_engine() as host:
            monkeypatch.setenv("DOCKER_HOST", host)
            yield DockerContainerFactory()

    @pytest.fixture
    def spec(self) -> ContainerSpec:
        return ContainerSpec("forwarded_ports", docker_image="debian:bookworm-slim", network=NO_NETWORK)


@pytest.mark.parametrize("program", ["python3", "node", "none"])
async def test_relay_uses_an_available_interpreter(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: list[Mount]
) -> None:
    """One with Python, one with Node alone, one with nothing, which is refused by name."""
    forwarded_ports, mounts = ForwardedPortContract(), ()
    if program == "node":
        if (node := shutil.which("node")) is None:
            pytest.skip("this machine has no node")
        shutil.copy(Path(node).resolve(), tmp_path / "node")
        mounts = (Mount(tmp_path, "/opt/node", f"sha256:{tmp_path}"),)
        copied += mounts
    image = "python:3.12-slim" if program == "python3" else "debian:bookworm-slim"
    spec = ContainerSpec(
        "forwarded_ports", docker_image=image, network=NO_NETWORK, mounts=mounts, env={"PATH": f"{PATH}:/opt/node"}
    )
    async with forwarded_engine() as host:
        monkeypatch.setenv("DOCKER_HOST", host)
        async with DockerContainerFactory()(spec) as box:
            await box.exec("rm -f /usr/bin/perl*")
            if program == "none":
                with pytest.raises(PortForwardingError, match=r"neither python3 nor perl nor node.*or run as root"):
                    await forwarded_ports.open(box, Server(echo))
                return
            async with forwarded_ports.opened(box) as (port, _):
                assert await forwarded_ports.run(box, greet(port)) == "hello\n"


@pytest.fixture
def copied() -> Iterator[list[Mount]]:
    """Directories whose volumes are removed after the test. A run keeps them for the next run."""
    directories: list[Mount] = []
    with closing(docker.from_env()) as client:
        yield directories
        for directory in directories:
            with contextlib.suppress(docker.errors.NotFound):
                client.volumes.get(volume_name(directory)).remove()


@pytest.fixture
def tool(tmp_path: Path) -> Mount:
    program = tmp_path / "tool" / "bin" / "run"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho ran\n")
    program.chmod(0o755)
    return Mount(tmp_path / "tool", "/opt/ares_exp/tool", f"sha256:{tmp_path}")


@pytest.mark.parametrize(
    "capture", [pytest.param("archive", marks=pytest.mark.nightly), pytest.param("upper", marks=pytest.mark.root)]
)
async def test_mounts_are_read_only_and_not_captured(tmp_path: Path, tool: Mount, capture: str) -> None:
    objects = ObjectStore(tmp_path / "objects")
    factory = DockerContainerFactory(capture=capture)  # type: ignore[arg-type]
    spec = ContainerSpec("mounts", docker_image="debian:bookworm-slim", mounts=(tool,))
    assert factory.check(spec) == []
    async with factory(spec) as box:
        assert (await box.exec("/opt/ares_exp/tool/bin/run")).output == "ran\n"
        written = await box.exec("touch /opt/ares_exp/tool/x; rm -r /opt/ares_exp/tool; echo mine >/opt/file")
        assert "Read-only file system" in written.output
        delta = await box.capture_changes(objects)  # type: ignore[attr-defined]
    assert [path for path, entry in delta.entries.items() if entry.kind == "file"] == ["/opt/file"]
    assert not any(path.startswith(tool.target) for path in delta.entries)
    assert delta.notes == ()
    assert (tool.source / "bin" / "run").exists()
    async with factory(replace(spec, changes=StoredChanges(delta, objects))) as box:
        assert (await box.exec("/opt/ares_exp/tool/bin/run; cat /opt/file")).output == "ran\nmine\n"


async def test_image_without_glibc_is_rejected_before_start(tmp_path: Path, tool: Mount) -> None:
    (tmp_path / "Dockerfile").write_text("FROM debian:bookworm-slim\nRUN rm /lib*/ld-linux*\n")
    spec = ContainerSpec("musl", context_dir=tmp_path, mounts=(replace(tool, needs_glibc="tool"),))
    with pytest.raises(AgentInstallError, match=r"no glibc .*, and the package tool needs glibc"):
        await DockerContainerFactory(keep_image=False)(spec).start()


async def test_remote_engine_copies_each_directory_once(
    tmp_path: Path, tool: Mount, monkeypatch: pytest.MonkeyPatch, copied: list[Mount]
) -> None:
    copied.append(tool)
    objects, show = ObjectStore(tmp_path / "objects"), "/opt/ares_exp/tool/bin/run; touch /opt/ares_exp/tool/x"
    spec = ContainerSpec("mounts", docker_image="debian:bookworm-slim", mounts=(tool,))
    async with forwarded_engine() as host:
        monkeypatch.setenv("DOCKER_HOST", host)
        factory = DockerContainerFactory(capture="archive")
        assert factory.check(spec) == []
        boxes = [factory(spec), factory(spec)]
        await asyncio.gather(*(box.start() for box in boxes))
        try:
            for box in boxes:
                shown = (await box.exec(show)).output
                assert shown.startswith("ran\n")
                assert "Read-only file system" in shown
            await boxes[0].exec("echo mine >/opt/file")
            delta = await boxes[0].capture_changes(objects)  # type: ignore[attr-defined]
        finally:
            await asyncio.gather(*(box.stop() for box in boxes))
        assert [path for path, entry in delta.entries.items() if entry.kind == "file"] == ["/opt/file"]
        shutil.rmtree(tool.source)  # there is nothing left to copy
        async with factory(spec) as box:
            assert (await box.exec(show)).output.startswith("ran\n")
        for of_cache in (True, False):
            listed = functools.partial(DockerContainerFactory.find_leftovers, images=of_cache)
            found = await asyncio.to_thread(lambda listed=listed: list(listed()))  # type: ignore[misc]
            assert (volume_name(tool) in [one.name for one in found]) == of_cache


async def test_incomplete_copy_is_repeated(
    tmp_path: Path, tool: Mount, monkeypatch: pytest.MonkeyPatch, copied: list[Mount]
) -> None:
    copied.append(tool)
    with closing(docker.from_env()) as client:
        client.volumes.create(volume_name(tool), labels={KEPT_VOLUME: tool.target})  # as a dead process leaves it
    async with forwarded_engine() as host:
        monkeypatch.setenv("DOCKER_HOST", host)
        spec = ContainerSpec("mounts", docker_image="debian:bookworm-slim", mounts=(tool,))
        async with DockerContainerFactory()(spec) as box:
            assert (await box.exec("/opt/ares_exp/tool/bin/run")).output == "ran\n"


def test_compose_on_a_remote_engine_rejects_mounts(
    monkeypatch: pytest.MonkeyPatch, tool: Mount, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    spec = ContainerSpec("mounts", compose_file=tmp_path / "docker-compose.yaml", mounts=(tool,))
    with pytest.raises(UnsupportedTaskError, match=r"/opt/ares_exp/tool.*DOCKER_HOST=tcp://192\.0\.2\.1:2375"):
        DockerContainerFactory().check(spec)


@needs_compose
@pytest.mark.root
async def test_only_main_has_ports_and_mounts(tmp_path: Path, tool: Mount) -> None:
    services = f"  main: {{}}\n  other:\n    image: {IMAGE}\n    command: [sleep, infinity]\n"
    forwarded_ports = ForwardedPortContract()
    spec = compose_spec(tmp_path, services, network=NO_NETWORK, mounts=(tool,))
    async with DockerContainerFactory()(spec) as box, forwarded_ports.opened(box) as (port, _):
        assert await forwarded_ports.run(box, greet(port)) == "hello\n"
        assert await forwarded_ports.run(box, "/opt/ares_exp/tool/bin/run") == "ran\n"
        other = box.service("other")  # type: ignore[attr-defined]
        elsewhere = await other.exec(f"bash -c 'exec 3<>/dev/tcp/main/{port}'; ls /opt/ares_exp")
        assert "Connection refused" in elsewhere.output
        assert "No such file" in elsewhere.output


@pytest.mark.root
@pytest.mark.parametrize("is_remote", [False, True])
async def test_killed_process_closes_its_forwarded_port(is_remote: bool) -> None:
    async with (
        forwarded_engine() as host,
        killed_forwarded_port("docker", {"DOCKER_HOST": host} if is_remote else {}) as forwarded_port,
    ):
        assert len(forwarded_port.relays) == is_remote
        assert await asyncio.to_thread(forwarded_port.is_gone)
