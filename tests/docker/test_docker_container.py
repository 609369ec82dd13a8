from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.errors import ImageNotFound, NotFound

from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.container import DockerContainer
from ares_exp.containers.docker.image import image_tag
from ares_exp.errors import (
    ContainerDiedError,
    ContainerStartError,
    EnvironmentStartTimeoutError,
    PreflightError,
    TaskError,
    UnsupportedTaskError,
)

pytestmark = pytest.mark.docker

IMAGE = "debian:bookworm-slim"
SPEC = ContainerSpec("docker test", docker_image=IMAGE)

STARTER = """
import asyncio, sys
from ares_exp.containers.container import ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory

async def main():
    box = DockerContainerFactory()(ContainerSpec("dead man", docker_image=sys.argv[1]))
    await box.start()
    print(box.container_name, flush=True)
    await box.exec("sleep 1000")

asyncio.run(main())
"""


@pytest.fixture
def engine() -> Iterator[docker.DockerClient]:
    client = docker.from_env()
    yield client
    client.close()


@pytest.fixture
def context(tmp_path: Path, engine: docker.DockerClient) -> Iterator[Path]:
    """A build context; the image that it has at the end of the test is removed."""
    directory = tmp_path / "environment"
    directory.mkdir()
    yield directory
    with contextlib.suppress(ImageNotFound):
        engine.images.remove(image_tag("built", directory), force=True)


def built(context: Path, dockerfile: str) -> ContainerSpec:
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\n{dockerfile}")
    return ContainerSpec("built", context_dir=context)


def exists(engine: docker.DockerClient, box: DockerContainer) -> bool:
    try:
        engine.api.inspect_container(box.container_name)
    except NotFound:
        return False
    return True


# Nothing is left behind


async def test_a_killed_runner_takes_its_container_along(engine: docker.DockerClient) -> None:
    runner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STARTER, IMAGE, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert runner.stdout is not None
    name = (await asyncio.wait_for(runner.stdout.readline(), 30)).decode().strip()
    assert engine.api.inspect_container(name)["State"]["Running"]
    runner.send_signal(signal.SIGKILL)
    await runner.wait()
    async with asyncio.timeout(5):
        while name in [one.name for one in engine.containers.list(all=True, ignore_removed=True)]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.06, 0.15, 0.3])
async def test_a_cancelled_start_leaves_nothing(engine: docker.DockerClient, delay: float) -> None:
    box = DockerContainerFactory()(SPEC)
    start = asyncio.create_task(box.start())
    await asyncio.sleep(delay)
    start.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await start
        await box.stop()  # it was faster
    assert not exists(engine, box)


async def test_a_late_start_leaves_nothing(engine: docker.DockerClient) -> None:
    box = DockerContainerFactory()(ContainerSpec("late", docker_image=IMAGE, start_timeout_sec=0.02))
    with pytest.raises(EnvironmentStartTimeoutError, match=r"late did not start within 0\.02 s"):
        await box.start()
    assert not exists(engine, box)


async def test_stop_removes(engine: docker.DockerClient) -> None:
    async with DockerContainerFactory()(SPEC) as box:
        labels = engine.api.inspect_container(box.container_name)["Config"]["Labels"]
    assert not exists(engine, box)
    assert labels["ares_exp.pid"] == str(os.getpid())
    assert all(labels[f"ares_exp.{name}"] for name in ("run", "host", "process-start"))


# Its death is told


async def test_removed_from_outside(engine: docker.DockerClient) -> None:
    async with DockerContainerFactory()(SPEC) as box:
        running = asyncio.create_task(box.exec("sleep 100"))
        await box.exec("true")
        engine.api.remove_container(box.container_name, force=True)
        with pytest.raises(ContainerDiedError, match="The container of docker test"):
            await asyncio.wait_for(running, 20)
        with pytest.raises(ContainerDiedError, match="The container of docker test"):
            await box.exec("true")
        with pytest.raises(ContainerDiedError):
            await box.download("/etc/hostname", "/nonexistent/x")


async def test_a_command_over_the_memory_limit_is_killed_alone() -> None:
    async with DockerContainerFactory()(ContainerSpec("small", docker_image=IMAGE, memory_mb=64)) as box:
        assert (await box.exec("tail /dev/zero", timeout_sec=60)).exit_code == 137
        assert (await box.exec("echo next")).output == "next\n"


# What the spec and the options become


async def test_limits(engine: docker.DockerClient) -> None:
    spec = ContainerSpec("limits", docker_image=IMAGE, cpus=0.5, memory_mb=128)
    async with DockerContainerFactory(pids_limit=77)(spec) as box:
        config = engine.api.inspect_container(box.container_name)["HostConfig"]
    assert (config["NanoCpus"], config["Memory"], config["MemorySwap"]) == (500_000_000, 128 * 2**20, 128 * 2**20)
    assert config["PidsLimit"] == 77


async def test_more_processors_than_there_are() -> None:
    async with DockerContainerFactory()(ContainerSpec("many", docker_image=IMAGE, cpus=10_000)) as box:
        assert (await box.exec("true")).exit_code == 0


@pytest.mark.parametrize(("asked", "override"), [("no-network", None), ("public", "no-network")])
async def test_no_network(asked: str, override: str | None) -> None:
    spec = ContainerSpec("offline", docker_image=IMAGE, network=asked)  # type: ignore[arg-type]
    async with DockerContainerFactory(network=override)(spec) as box:  # type: ignore[arg-type]
        assert (await box.exec("ls /sys/class/net")).output == "lo\n"


async def test_public_network() -> None:
    hosts = {"example.test": "192.0.2.7"}
    async with DockerContainerFactory(extra_hosts=hosts)(SPEC) as box:
        assert (await box.exec("ls /sys/class/net")).output == "eth0\nlo\n"
        assert (await box.exec("grep example.test /etc/hosts")).output.split() == ["192.0.2.7", "example.test"]


async def test_env_of_the_factory_gives_way_to_the_task() -> None:
    spec = ContainerSpec("env", docker_image=IMAGE, env={"A": "task"})
    async with DockerContainerFactory(env={"A": "factory", "B": "factory"})(spec) as box:
        assert (
            await box.exec("echo $A $B; tr '\\0' '\\n' < /proc/1/environ | grep ^A=")
        ).output == "task factory\nA=task\n"


async def test_plain_shell_keeps_the_path_of_the_image(context: Path) -> None:
    spec = built(context, "ENV PATH=/opt/mine:$PATH\n")
    async with DockerContainerFactory(login_shell=False)(spec) as box:
        assert (await box.exec("echo $PATH")).output.startswith("/opt/mine:")


# Images


async def test_the_image_of_a_dockerfile(context: Path, engine: docker.DockerClient) -> None:
    (context / "file").write_text("first")
    spec = built(
        context,
        "COPY file /file\nUSER nobody\nWORKDIR /tmp\n"
        'ENTRYPOINT ["sh", "-c", "touch /tmp/entered; exec \\"$@\\"", "--"]\n',
    )
    tag = image_tag("built", context)
    async with DockerContainerFactory()(spec) as box:
        assert (await box.exec("id -un; pwd; cat /file; ls")).output == "nobody\n/tmp\nfirstentered\n"
        await box.upload(context / "file", "sub/copy")
        assert (await box.exec("stat -c %U /tmp/sub/copy")).output == "root\n"
    identity = engine.images.get(tag).id
    async with DockerContainerFactory()(spec) as box:
        assert engine.images.get(tag).id == identity
    (context / "file").write_text("second")
    assert image_tag("built", context) != tag
    engine.images.remove(tag)


async def test_containers_that_start_together_build_once(context: Path, engine: docker.DockerClient) -> None:
    spec = built(context, "RUN cat /proc/sys/kernel/random/uuid > /id\n")
    boxes = [DockerContainerFactory()(spec) for _ in range(4)]
    try:
        await asyncio.gather(*(box.start() for box in boxes))
        assert len({(await box.exec("cat /id")).output for box in boxes}) == 1
    finally:
        await asyncio.gather(*(box.stop() for box in boxes))
    assert not engine.containers.list(all=True, filters={"status": "exited", "ancestor": image_tag("built", context)})


async def test_an_image_that_is_not_kept(context: Path, engine: docker.DockerClient) -> None:
    spec = built(context, "RUN echo not kept\n")
    async with DockerContainerFactory(keep_image=False)(spec):
        assert engine.images.get(image_tag("built", context))
    with pytest.raises(ImageNotFound):
        engine.images.get(image_tag("built", context))


async def test_a_build_that_fails_names_the_instruction(context: Path) -> None:
    spec = built(context, "RUN echo about to fail; exit 42\nRUN echo never\n")
    with pytest.raises(ContainerStartError) as caught:
        await DockerContainerFactory()(spec).start()
    message = str(caught.value)
    assert "Failing instruction: RUN echo about to fail; exit 42" in message
    assert "about to fail" in message.splitlines()[-1]
    assert "42" in message.splitlines()[0]
    assert "never" not in message


async def test_an_entrypoint_that_ends_is_shown(context: Path) -> None:
    spec = built(context, 'ENTRYPOINT ["sh", "-c", "echo I serve nobody; exit 3"]\n')
    with pytest.raises(ContainerStartError, match="I serve nobody"):
        await DockerContainerFactory()(spec).start()


async def test_an_image_that_cannot_be_had() -> None:
    image = "localhost:1/no/such:image"
    with pytest.raises(ContainerStartError, match=image):
        await DockerContainerFactory()(ContainerSpec("absent", docker_image=image)).start()


# Without starting anything


def test_check(tmp_path: Path) -> None:
    check = DockerContainerFactory().check
    (tmp_path / "environment").mkdir()
    spec = ContainerSpec("t", context_dir=tmp_path / "environment")
    with pytest.raises(TaskError, match=r"found no Dockerfile in .*environment"):
        check(spec)
    with pytest.raises(TaskError, match="no Dockerfile anywhere"):
        check(ContainerSpec("t"))
    (tmp_path / "environment" / "Dockerfile").write_text(f"FROM {IMAGE}\n")
    assert check(spec) == []
    assert "storage_mb=10" in check(ContainerSpec("t", docker_image=IMAGE, storage_mb=10))[0]
    with pytest.raises(UnsupportedTaskError, match="GPUs"):
        check(ContainerSpec("t", docker_image=IMAGE, gpus=1))
    (tmp_path / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(UnsupportedTaskError, match="several services"):
        check(spec)


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("unix:///no/such.sock", "No Docker engine answers at unix:///no/such.sock"),
        ("tcp://127.0.0.1:1", "No Docker engine answers at tcp://127.0.0.1:1"),
        ("ssh://somewhere", "Expected DOCKER_HOST to be"),
    ],
)
async def test_no_engine(monkeypatch: pytest.MonkeyPatch, host: str, message: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(PreflightError, match=message):
        await DockerContainerFactory().preflight()
    with pytest.raises(ContainerStartError, match=message):
        await DockerContainerFactory()(SPEC).start()


def test_containers_on_several_event_loops() -> None:
    outputs: list[str] = []

    async def run() -> None:
        async with DockerContainerFactory()(SPEC) as box:
            outputs.append((await box.exec("echo $HOSTNAME")).output)

    threads = [threading.Thread(target=lambda: asyncio.run(run())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(outputs)) == 3
