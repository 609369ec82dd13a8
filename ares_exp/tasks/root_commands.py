"""Commands that a task runs in its container as root, and that have to succeed."""

from __future__ import annotations

from ares_exp.containers.container import Container, Shell
from ares_exp.errors import ContainerError, EpisodeError

PLAIN_SHELL: Shell = "sh -c"
"""Reads no profile files: an agent may have edited them."""


async def as_root(
    container: Container, command: str, *, cwd: str | None = "/", failure: type[EpisodeError] = ContainerError
) -> None:
    """Runs what has to succeed.

    Args:
        container: Where.
        command: Is read by `sh`.
        cwd: Working directory; `None`: the container's own.
        failure: Class of the error where it does not succeed.

    Raises:
        EpisodeError: It did not succeed: a `failure`.
        ContainerError: The container failed.
    """
    result = await container.exec(command, cwd=cwd, user="root", timeout_sec=60, shell=PLAIN_SHELL)
    if result.exit_code != 0:
        raise failure(f"Expected `{command}` to succeed as root, got exit code {result.exit_code}: {result.output}")


async def make_log_dirs(container: Container, *folders: str) -> None:
    """Makes directories that anybody may write to, empty if they were there before, whoever has written there.

    Raises:
        ContainerError: They could not be made, or the container failed.
    """
    listing = " ".join(folders)
    made = f"mkdir -p {listing} && chmod 777 {listing} && find {listing} -mindepth 1 -delete"
    await as_root(container, f"{_without_links(listing)} && {made}")


async def empty(container: Container, folder: str) -> None:
    """Removes what is in a directory of the container, if it is there.

    Raises:
        ContainerError: It could not be removed, or the container failed.
    """
    emptied = f"if [ -d {folder} ]; then find {folder} -mindepth 1 -delete; fi"
    await as_root(container, f"{_without_links(folder)} && {emptied}")


def _without_links(listing: str) -> str:
    """Removes what an agent has put in the place of directories: behind a link nothing would be emptied."""
    return f"for d in {listing}; do if [ -L $d ] || [ ! -d $d ]; then rm -rf $d; fi; done"
