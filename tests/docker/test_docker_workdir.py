"""The image's working directory, which a command may remove."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from ares_exp.containers.container import Container, ContainerSpec
from ares_exp.containers.docker import DockerContainerFactory

pytestmark = [pytest.mark.docker, pytest.mark.once]


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
