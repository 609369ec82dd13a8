"""Directories below another one that may hold hostile links, opened safely."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_beneath(root: int, path: str) -> Iterator[int]:
    """Opens the directory at `path` below `root`, step by step; returns its file descriptor.

    Args:
        root: A file descriptor.
        path: `""` for `root` itself, else `/a/b`, without `..`.

    Raises:
        OSError: It is not there, or a link or something else that is no directory is on the way.
    """
    directory = os.dup(root)
    try:
        for name in path.split("/")[1:]:
            inner = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
            os.close(directory)
            directory = inner
        yield directory
    finally:
        os.close(directory)
