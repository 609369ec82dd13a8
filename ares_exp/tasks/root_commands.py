"""Commands that a task runs in its container as root, and that must succeed."""

from __future__ import annotations

import posixpath

from ares_exp.containers.container import Container, Shell
from ares_exp.errors import ContainerError, EpisodeError

PLAIN_SHELL: Shell = "sh -c"
"""Reads no profile files: an agent may have edited them."""
CLEAR_TIMEOUT_SEC = 600.0
"""Bound on the removal of what is in a few directories: an agent may have left millions of files there."""
_CLEAR = """\
is_empty() { [ -d $1 ] && [ ! -L $1 ] && [ "$(ls -A $1 | wc -c)" -eq 0 ]; }
gone() { [ ! -e $1 ] && [ ! -L $1 ]; }
clear() { rm -rf $1 2>/dev/null; gone $1 || is_empty $1 || mv $1 $1.left-$$; }
"""
"""Shell functions. What is mounted stays, and is emptied; what cannot be removed (too deep a tree) is moved away."""


async def as_root(
    container: Container,
    command: str,
    *,
    cwd: str | None = "/",
    timeout_sec: float = 60.0,
    failure: type[EpisodeError] = ContainerError,
) -> str:
    """Runs what has to succeed.

    Args:
        container: Where.
        command: Is read by `sh`.
        cwd: Working directory; `None`: the container's own.
        timeout_sec: Bound on it.
        failure: Class of the error where it does not succeed.

    Returns:
        What it printed.

    Raises:
        EpisodeError: It did not succeed: a `failure`.
        ContainerError: The container failed.
    """
    result = await container.exec(command, cwd=cwd, user="root", timeout_sec=timeout_sec, shell=PLAIN_SHELL)
    if result.exit_code != 0:
        ending = "took too long" if result.timed_out else f"got exit code {result.exit_code}"
        raise failure(f"Expected `{command}` to succeed as root, {ending}: {result.output}")
    return result.output


async def make_log_dirs(container: Container, *folders: str) -> None:
    """Makes world-writable directories, emptied if they were there before, whoever has written there.

    Whatever else is in their place is replaced; above them, what keeps them from being made.

    Raises:
        ContainerError: They could not be made, or the container failed.
    """
    above = " ".join(dict.fromkeys(map(posixpath.dirname, folders)))
    listing = " ".join(folders)
    made = (
        f"for d in {listing}; do clear $d || exit 1; done\n"
        f"if ! mkdir -p {listing} 2>/dev/null; then for d in {above}; do clear $d; done; mkdir -p {listing}; fi &&\n"
        f"chmod a+rx / {above} && chmod 777 {listing}"
    )
    await as_root(container, _CLEAR + made, timeout_sec=CLEAR_TIMEOUT_SEC)


async def empty(container: Container, folder: str) -> bool:
    """Makes an empty directory of one of the container, or of whatever is in its place; none where there is none.

    Returns:
        Whether there was anything but an empty directory.

    Raises:
        ContainerError: It could not be emptied, or the container failed.
    """
    command = f"gone {folder} || {{ is_empty {folder} || echo left; clear {folder} && mkdir -p {folder}; }}"
    return bool((await as_root(container, _CLEAR + command, timeout_sec=CLEAR_TIMEOUT_SEC)).strip())
