"""The files of a task beside a prebuilt image: `environment/`, where it is not the definition of one."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ares_exp.containers.container import Container
from ares_exp.errors import ContainerStartError
from ares_exp.tasks.environment_section import EnvironmentSection
from ares_exp.tasks.task_files import CONTAINER_DEFINITIONS
from ares_exp.tasks.verification.root_commands import PLAIN_SHELL


async def upload_image_files(container: Container, folder: Path, environment: EnvironmentSection) -> None:
    """Copies them to the working directory of a container of that image, if there are some.

    Args:
        container: Started.
        folder: `environment/` of the task.
        environment: Says whether the image is a prebuilt one.

    Raises:
        ContainerStartError: The container has no working directory.
        ContainerError: The container failed.
    """
    if not environment.docker_image or not await asyncio.to_thread(_is_data, folder):
        return
    here = await container.exec("pwd", user="root", timeout_sec=60, shell=PLAIN_SHELL)
    if here.exit_code != 0:
        raise ContainerStartError(f"{folder} has to go to the working directory: {here.output.strip()}.")
    await container.upload(folder, (here.output.splitlines() or ["/"])[-1])


def _is_data(folder: Path) -> bool:
    if not folder.is_dir() or any((folder / name).exists() for name in CONTAINER_DEFINITIONS):
        return False
    return any(folder.iterdir())
