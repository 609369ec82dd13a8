"""The working directory of a container, which an agent may have removed."""

from __future__ import annotations

from ares_exp.containers.container import Container, User
from ares_exp.containers.owned_directory import working_directory
from ares_exp.errors import TransferError
from ares_exp.tasks.root_commands import PLAIN_SHELL


async def usable_workdir(container: Container, *, user: User | None) -> str | None:
    """Where a command can be run: without a working directory none would be, and there would be no reward.

    Args:
        container: Whose working directory is made anew, empty, where it is missing.
        user: Who runs the command; `None` is the image's user.

    Returns:
        `None`: the container's own; `/` where that cannot be used, such as a file in its place.

    Raises:
        ContainerError: The container failed.
    """
    if not await _is_usable(container, "root"):  # root first: a backend may open shells of others in that directory
        async with working_directory("verifier") as nothing:
            try:
                await container.upload(nothing, ".")  # makes it
            except TransferError:
                return "/"
    return None if await _is_usable(container, user) else "/"


async def _is_usable(container: Container, user: User | None) -> bool:
    return (await container.exec('test -e "$(pwd -P)"', user=user, timeout_sec=60, shell=PLAIN_SHELL)).exit_code == 0
