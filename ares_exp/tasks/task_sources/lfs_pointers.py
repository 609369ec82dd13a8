"""Pointers of Git LFS: small texts in the place of files that were not fetched."""

from __future__ import annotations

import os
from pathlib import Path

from ares_exp.errors import TaskError

_START = b"version https://git-lfs.github.com/spec/v1\n"
_MAX_BYTES = 1024
"""The size of a pointer, at most, by the specification of Git LFS."""

_SHOWN = 3


def refuse_pointers(task: Path, remedy: str = "Install `git-lfs`, and run `git lfs pull` in that repository.") -> None:
    """Refuses a task with pointers. Blocking.

    Args:
        task: Its directory.
        remedy: What helps, for the message.

    Raises:
        TaskError: With their names.
    """
    files = (Path(directory, name) for directory, _, names in os.walk(task) for name in names)
    found = sorted(path.relative_to(task).as_posix() for path in files if _is_pointer(path))
    if found:
        rest = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise TaskError(
            f"{task}: expected files, got pointers to files in Git LFS: {', '.join(found[:_SHOWN])}{rest}. {remedy}"
        )


def _is_pointer(path: Path) -> bool:
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return False
        with path.open("rb") as file:
            return file.read(len(_START)) == _START
    except OSError:  # who needs it says so
        return False
