"""Files of Git LFS that are not there: in their place lies a small text, the pointer, that says which they are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ares_exp.errors import TaskError

_BEGIN = b"version https://git-lfs.github.com/spec/v1\n"
_MAX_BYTES = 1024
"""What a pointer has at most, by the specification of Git LFS."""

_SHOWN = 3


def is_pointer(path: Path) -> bool:
    """Whether a plain file is a pointer. Blocking.

    Raises:
        OSError: It cannot be read.
    """
    if path.stat().st_size > _MAX_BYTES:
        return False
    with path.open("rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN


def refuse_pointers(task: Path) -> None:
    """Refuses a task of this machine that has pointers. Blocking.

    Args:
        task: Its directory.

    Raises:
        TaskError: With their names.
    """
    found = [path.relative_to(task).as_posix() for path in _files(task) if _looks_like_one(path)]
    if found:
        rest = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise TaskError(
            f"{task}: expected files, got pointers to files in Git LFS: {', '.join(sorted(found)[:_SHOWN])}{rest}. "
            "Install `git-lfs`, and run `git lfs pull` in that repository."
        )


def _files(folder: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(folder):
        yield from (Path(directory, name) for name in names)


def _looks_like_one(path: Path) -> bool:
    try:
        return path.is_file() and is_pointer(path)
    except OSError:  # who needs it says so
        return False
