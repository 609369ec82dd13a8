import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import docker
import pytest
import pytest_asyncio
from docker.errors import ImageNotFound

from ares_exp.containers.child_process import ChildProcess
from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.container_lifetime import starts
from ares_exp.containers.docker.engine import connect, connect_blocking
from ares_exp.containers.docker.image import ensure_image, find_buildkit, image_tag, work_lock
from ares_exp.errors import ContainerStartError, EnvironmentStartTimeoutError
from tests.compatibility.case import write_task
from tests.docker.dockerfiles import built
from tests.docker.registry import Registry
from tests.leaks import processes, until

pytestmark = [pytest.mark.docker, pytest.mark.once]

BUILDER = """
import asyncio, sys
from pathlib import Path
from ares_exp.containers.docker.engine import connect
from ares_exp.containers.docker.image import ensure_image

async def main():
    context = Path(sys.argv[1])
    print(await ensure_image(await connect(), name=context.name, docker_image=None, context_dir=context))

asyncio.run(main())
"""


@asynccontextmanager
async def builder(context: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Another process that builds the image of a context and prints its name."""
    command = (sys.executable, "-c", BUILDER, str(context))
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ensure(context: Path, **options: Any) -> str:
    return await ensure_image(await connect(), name=context.name, docker_image=None, context_dir=context, **options)


async def test_dockerfile_image_follows_its_context(context: Path, engine: docker.DockerClient) -> None:
    (context / "file").write_text("first")
    spec = built(
        context,
        "COPY file /file\nUSER nobody\nWORKDIR /tmp\n"
        'ENTRYPOINT ["sh", "-c", "touch /tmp/entered; exec \\"$@\\"", "--"]\n',
    )
    tag = image_tag(context.name, context)
    async with DockerContainerFactory()(spec) as box:
        assert (await box.exec("id -un; pwd; cat /file; ls")).output == "nobody\n/tmp\nfirstentered\n"
        await box.upload(context / "file", "sub/copy")
        assert (await box.exec("stat -c %U /tmp/sub/copy")).output == "root\n"
    identity = engine.images.get(tag).id
    async with DockerContainerFactory()(spec) as box:
        assert engine.images.get(tag).id == identity
        assert box.image == tag
    (context / "file").write_text("second")
    assert image_tag(context.name, context) != tag


def test_tag_depends_on_the_content(context: Path) -> None:
    built(context, "COPY . /c\n")
    (context / "sub").mkdir()
    (context / "sub" / "file").write_text("one")
    seen = [image_tag(context.name, context)]
    os.utime(context / "sub" / "file", (1, 1))
    assert image_tag(context.name, context) == seen[0]
    (context / "sub" / "file").chmod(0o755)
    seen.append(image_tag(context.name, context))
    (context / "link").symlink_to("sub/file")
    seen.append(image_tag(context.name, context))
    (context / "link").unlink()
    (context / "link").symlink_to("sub")
    seen.append(image_tag(context.name, context))
    (context / "sub" / "file").write_text("two")
    seen.append(image_tag(context.name, context))
    (context / "sub" / "file").rename(context / "sub" / "other")
    seen.append(image_tag(context.name, context))
    (context / "empty").mkdir()
    seen.append(image_tag(context.name, context))
    (context / "sub" / "other").chmod(0o644)
    seen.append(image_tag(context.name, context))
    assert len(set(seen)) == len(seen) == 8
    assert all(tag.startswith(f"ares-exp/{context.name}:") for tag in seen)


async def test_ignored_files_are_neither_hashed_nor_copied(context: Path) -> None:
    (context / ".dockerignore").write_text("# a comment\n\n**/*.log\nprivate\n!private/but\nDockerfile\n")
    for name in ("a.log", "private/key", "private/but", "kept"):
        (context / name).parent.mkdir(exist_ok=True)
        (context / name).write_text("first")
    spec = built(context, "COPY . /c\n")
    tag = image_tag(context.name, context)
    (context / "a.log").write_text("second")
    (context / "b.log").write_text("second")
    (context / "private" / "key").unlink()
    assert image_tag(context.name, context) == tag
    async with DockerContainerFactory()(spec) as box:
        found = (await box.exec("cd /c; find . -type f | sort")).output.split()
    assert found == ["./.dockerignore", "./kept", "./private/but"]
    (context / "private" / "but").write_text("second")
    assert image_tag(context.name, context) != tag


async def test_concurrent_containers_build_once(context: Path, engine: docker.DockerClient) -> None:
    spec = built(context, "RUN cat /proc/sys/kernel/random/uuid > /id\n")
    boxes = [DockerContainerFactory()(spec) for _ in range(4)]
    try:
        await asyncio.gather(*(box.start() for box in boxes))
        assert len({(await box.exec("cat /id")).output for box in boxes}) == 1
    finally:
        await asyncio.gather(*(box.stop() for box in boxes))
    assert not engine.containers.list(
        all=True, filters={"status": "exited", "ancestor": image_tag(context.name, context)}
    )


async def test_concurrent_processes_build_once(context: Path, engine: docker.DockerClient) -> None:
    built(context, "RUN cat /proc/sys/kernel/random/uuid > /id; sleep 1\n")
    tag = image_tag(context.name, context)
    async with asyncio.timeout(60), builder(context) as one, builder(context) as other:
        outputs = await asyncio.gather(one.communicate(), other.communicate())
    assert [output.decode().strip() for output, _ in outputs] == [tag, tag]
    assert len(engine.api.images(all=True, filters={"label": f"ares_exp.image={tag}"})) == 1  # untagged ones included


async def test_wait_for_another_builder_counts_as_start(context: Path, engine: docker.DockerClient) -> None:
    built(context, "RUN echo waited for\n")
    tag = image_tag(context.name, context)
    spec = ContainerSpec(context.name, context_dir=context, start_timeout_sec=0.5)
    with work_lock(f"{(await connect()).host} {tag}", ChildProcess()), pytest.raises(EnvironmentStartTimeoutError):
        await asyncio.wait_for(DockerContainerFactory()(spec).start(), 30)
    with pytest.raises(ImageNotFound):
        engine.images.get(tag)
    assert await ensure(context) == tag


async def test_temporary_image_is_removed(context: Path, engine: docker.DockerClient) -> None:
    spec = built(context, "RUN echo not kept\n")
    tag = image_tag(context.name, context)
    async with DockerContainerFactory(keep_image=False)(spec):
        labels = engine.images.get(tag).labels
    with pytest.raises(ImageNotFound):
        engine.images.get(tag)
    assert labels["ares_exp.image"] == tag
    assert json.loads(labels["ares_exp.image-builder"])["ares_exp.pid"] == str(os.getpid())
    await ensure(context)
    assert set(engine.images.get(tag).labels) == {"ares_exp.image", "test"}


async def test_image_removed_during_start_is_rebuilt(context: Path, engine: docker.DockerClient) -> None:
    box = DockerContainerFactory()(built(context, "RUN echo taken along\n"))
    found = await connect()
    async with AsyncExitStack() as slots, asyncio.timeout(60):
        for _ in range(found.capabilities.simultaneous_starts):
            await slots.enter_async_context(starts(found))
        start = asyncio.create_task(box.start())
        while box.image is None:  # noqa: ASYNC110 - from now on it waits for a slot
            await asyncio.sleep(0.02)
        engine.images.remove(box.image)
    try:
        await asyncio.wait_for(start, 60)
        assert (await box.exec("echo here")).output == "here\n"
    finally:
        await box.stop()


@pytest.mark.parametrize("builder", ["of PATH", "classic"])
async def test_failed_build_names_the_instruction(context: Path, monkeypatch: pytest.MonkeyPatch, builder: str) -> None:
    if builder == "classic":
        monkeypatch.setenv("PATH", "/nonexistent")
    spec = built(
        context, "RUN echo about to fail; printf '\\033[31mred\\033[0m \\033[2J\\n'; exit 42\nRUN echo never\n"
    )
    with pytest.raises(ContainerStartError) as caught:
        await DockerContainerFactory()(spec).start()
    message = str(caught.value)
    assert "echo about to fail" in message
    assert "\nabout to fail\nred \N{REPLACEMENT CHARACTER}[2J" in message
    assert "42" in message
    assert "never" not in message


async def test_end_of_a_long_output_is_shown(context: Path) -> None:
    built(
        context,
        "RUN head -c 100000 /dev/zero | tr '\\0' x; echo; seq 1000; head -c 10000 /dev/zero | tr '\\0' x; exit 1\n",
    )
    with pytest.raises(ContainerStartError) as caught:
        await ensure(context)
    message = str(caught.value)
    assert "\n1000\n" in message
    assert "\n900\n" not in message
    assert len(message) < 5000


@pytest.fixture
def registry(engine: docker.DockerClient) -> Any:
    with Registry() as running:
        yield running
    for image in engine.api.images(name=running.image):
        engine.api.remove_image(image["Id"], force=True)


@pytest.mark.parametrize("form", ["{image}:v1", "{image}@{digest}", "{image}:v1@{digest}"])
async def test_image_is_pulled_once(registry: Registry, engine: docker.DockerClient, form: str) -> None:
    image = form.format(image=registry.image, digest=registry.digest)
    for _ in range(2):
        assert await ensure_image(await connect(), name="t", docker_image=image, context_dir=None) == image
        assert engine.images.get(image).attrs["RepoDigests"] == [f"{registry.image}@{registry.digest}"]
        pulled = len(registry.requests)
    assert len(registry.requests) == pulled


async def test_failed_pull_is_retried(registry: Registry) -> None:
    registry.failures = 1
    await ensure_image(await connect(), name="t", docker_image=f"{registry.image}:v1", context_dir=None)


async def test_unknown_image_is_not_retried(registry: Registry) -> None:
    image = f"{registry.image}:v2"
    with pytest.raises(ContainerStartError, match=rf"The image {image} is not on this machine .* could not be pulled"):
        await ensure_image(await connect(), name="t", docker_image=image, context_dir=None)
    assert len([path for path in registry.requests if "/manifests/v2" in path]) <= 2  # asked once, not three times


@pytest.fixture
def buildkit() -> None:
    if find_buildkit(connect_blocking()) is None:
        pytest.skip("no docker command here drives BuildKit")


def running(mark: str) -> bool:
    """Whether a process has the mark in an argument."""
    return any(mark in words for _, _, _, words in processes())


@pytest.mark.usefixtures("buildkit")
async def test_buildkit_instructions_are_built(context: Path, engine: docker.DockerClient) -> None:
    (context / "file").write_text("text\n")
    (context / "ignored").write_text("")
    (context / ".dockerignore").write_text("ignored\n")
    spec = built(
        context,
        "COPY --chmod=751 . /c/\nRUN --mount=type=cache,target=/cache ls -d /cache > /mounted\n"
        "ARG TARGETARCH\nRUN echo $TARGETARCH > /arch\n",
    )
    async with DockerContainerFactory(keep_image=False)(spec) as box:
        assert (await box.exec("stat -c %a /c/file; cat /mounted; wc -l < /arch; ls /c")).output.split() == [
            *("751", "/cache", "1", "Dockerfile", "file")
        ]
        labels = engine.images.get(image_tag(context.name, context)).labels
    assert json.loads(labels["ares_exp.image-builder"])["ares_exp.pid"] == str(os.getpid())
    assert not engine.api.images(name=f"ares-exp/{context.name}")


@pytest.mark.usefixtures("buildkit")
@pytest.mark.parametrize(
    ("dockerfile", "said"),
    [
        ("FROM debian:bookworm-slim\nCOPY --newer-than-any-engine . /c\n", "# syntax=docker/dockerfile:1"),
        ("FROM localhost:1/no/such:image\nCOPY --chmod=755 . /c\n", "localhost:1/no/such"),
        ("# syntax=localhost:1/no/such:frontend\nANYTHING\n", "localhost:1/no/such:frontend"),
    ],
)
async def test_unbuildable_dockerfile_is_a_start_error(context: Path, dockerfile: str, said: str) -> None:
    (context / "Dockerfile").write_text(dockerfile)
    with pytest.raises(ContainerStartError, match=said):
        await ensure(context)


@pytest.mark.usefixtures("buildkit")
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.parametrize("end", ["cancel", "kill"])
async def test_build_without_waiters_is_cancelled(context: Path, engine: docker.DockerClient, end: str) -> None:
    mark = f"61.{uuid.uuid4().int % 10**12:012}"
    built(context, f"COPY --chmod=755 . /c\nRUN sleep {mark}\n")
    if end == "cancel":
        waiters = [asyncio.create_task(ensure(context)) for _ in range(2)]
        await until(lambda: running(mark))
        waiters[0].cancel()
        await asyncio.sleep(0.3)
        assert running(mark), "one still waits"
        waiters[1].cancel()
        await asyncio.wait(waiters)
    else:
        async with builder(context) as process:
            await until(lambda: running(mark))
            process.send_signal(signal.SIGKILL)
            await process.wait()
    await until(lambda: not running(mark) and not running(f"--tag=ares-exp/{context.name}"))
    assert not engine.api.images(name=f"ares-exp/{context.name}")


def test_unbuildable_task_is_refused_before_the_start(cli: Any, tmp_path: Path) -> None:
    dockerfile = "FROM debian:bookworm-slim\nRUN --mount=type=cache,target=/c true\n"
    write_task(tmp_path / "tasks" / "new", {"environment/Dockerfile": dockerfile, "solution/solve.sh": "exit 0\n"})
    done = cli("container=docker", "env.path=tasks", env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "environment/Dockerfile:2: RUN --mount needs BuildKit" in done.stderr
    assert "there is no docker command" in done.stderr
    assert not list(tmp_path.glob("outputs/*/*"))


@pytest_asyncio.fixture
async def box(tmp_path: Path) -> AsyncIterator[Container]:
    (tmp_path / "Dockerfile").write_text("FROM debian:bookworm-slim\nWORKDIR /app\n")
    async with DockerContainerFactory()(ContainerSpec("workdir", context_dir=tmp_path)) as box:
        yield box


async def test_working_directory_may_change_at_any_time(box: Container) -> None:
    await box.exec("chmod 700 /app")  # it is used also by users who cannot enter it
    assert (await box.exec("pwd", user="nobody")).output == "/app\n"
    await box.exec("cd / && rm -rf /app && mkdir /app && touch /app/new")
    for _ in range(4):
        assert (await box.exec("ls")).output.endswith("new\n")
    assert (await box.exec("pwd; id -un", user="nobody")).output == "/app\nnobody\n"
    await box.exec("rm -rf /app")
    await box.exec("mkdir /app; touch /app/newer")
    assert (await box.exec("ls")).output.endswith("newer\n")


async def test_new_shell_reports_a_missing_workdir(box: Container) -> None:
    await box.exec("cd / && rm -rf /app && touch /app")
    for _ in range(2):
        said = await box.exec("echo never", user="nobody")
        assert said.exit_code == 126
        assert "cannot change to the working directory '/app'" in said.output
    assert (await box.exec("pwd", cwd="/tmp", user="nobody")).output == "/tmp\n"
    await box.exec("rm /app && mkdir /app", cwd="/")
    assert (await box.exec("pwd", user="nobody")).output == "/app\n"
