"""Builds with BuildKit, where a `docker` command here builds with it; and what is said where none does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import uuid
from pathlib import Path
from typing import Any

import docker
import pytest

from ares_exp.containers.docker import DockerContainerFactory
from ares_exp.containers.docker.engine import connect_blocking
from ares_exp.containers.images.image import image_tag
from ares_exp.containers.images.image_build import find_buildkit
from ares_exp.errors import ContainerStartError
from tests.docker.dockerfiles import built
from tests.docker.test_docker_images import assert_tells_the_failure, builder, ensure

pytestmark = [pytest.mark.docker, pytest.mark.once]


@pytest.fixture
def buildkit() -> None:
    """Skips where nothing builds with BuildKit."""
    if find_buildkit(connect_blocking()) is None:
        pytest.skip("no docker command here drives BuildKit")


def running(mark: str) -> list[int]:
    """Processes with the mark in an argument, where the system shows them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (it happens in other processes)
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("buildkit")
async def test_what_only_buildkit_builds(context: Path, engine: docker.DockerClient) -> None:
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
async def test_a_build_that_fails_names_the_instruction(context: Path) -> None:
    spec = built(
        context,
        "COPY --chmod=755 . /c\nRUN echo before\nRUN echo about to fail; "
        "printf '\\033[31mred\\033[0m \\033[2J\\n'; exit 42\n"
        "RUN echo never\n",
    )
    with pytest.raises(ContainerStartError) as caught:
        await DockerContainerFactory()(spec).start()
    assert_tells_the_failure(str(caught.value))


@pytest.mark.usefixtures("buildkit")
async def test_a_newer_syntax_is_named_as_a_possible_reason(context: Path) -> None:
    built(context, "COPY --newer-than-any-engine . /c\n")
    with pytest.raises(ContainerStartError, match="# syntax=docker/dockerfile:1"):
        await ensure(context)


@pytest.mark.usefixtures("buildkit")
async def test_a_failure_without_an_instruction(context: Path) -> None:
    (context / "Dockerfile").write_text("FROM localhost:1/no/such:image\nCOPY --chmod=755 . /c\n")
    with pytest.raises(ContainerStartError, match="localhost:1/no/such"):
        await ensure(context)


@pytest.mark.usefixtures("buildkit")
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
@pytest.mark.parametrize("end", ["cancel", "kill"])
async def test_a_build_ends_with_those_who_wait_for_it(context: Path, engine: docker.DockerClient, end: str) -> None:
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


@pytest.mark.usefixtures("buildkit")
async def test_a_frontend_that_cannot_be_had(context: Path) -> None:
    (context / "Dockerfile").write_text("# syntax=localhost:1/no/such:frontend\nANYTHING\n")
    with pytest.raises(ContainerStartError, match="localhost:1/no/such:frontend"):
        await ensure(context)


def test_the_run_is_refused_before_it_starts(cli: Any, tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "new"
    for name, text in {
        "instruction.md": "Do it.\n",
        "task.toml": 'schema_version = "1.4"\n[task]\nname = "test/new"\n',
        "tests/test.sh": "exit 0\n",
        "solution/solve.sh": "exit 0\n",
        "environment/Dockerfile": "FROM debian:bookworm-slim\nRUN --mount=type=cache,target=/c true\n",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    done = cli("container=docker", "env.path=tasks", env={"PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "environment/Dockerfile:2: RUN --mount needs BuildKit" in done.stderr
    assert "there is no docker command" in done.stderr
    assert not list(tmp_path.glob("outputs/*/*"))
