"""Copies of tasks out of checked-out repositories; symbolic links become copies of their targets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ares_exp.errors import TaskError

MAX_ENTRIES = 100_000
MAX_BYTES = 20 * 10**9


def materialise(task: Path, target: Path) -> None:
    """Copies a folder. Links have to be relative and to stay inside of it; copies of their targets take their place.

    Args:
        task: The folder, as git has checked it out. It does not change meanwhile.
        target: The copy; must not be there.

    Raises:
        TaskError: A link is absolute, leads out or nowhere, or to a folder with links; or there is too much. The
            message starts with the entry's path in the task.
        OSError: It cannot be read or written.
    """
    root = task.resolve()
    count = size = 0
    for entry in _entries(root):
        meant = _target(entry, root) if entry.is_symlink() else entry
        # A folder that is linked to is copied once more: without links in it, no circle can come about.
        for path in _entries(meant) if entry.is_symlink() and meant.is_dir() else (meant,):
            if path.is_symlink():
                raise _refusal(entry, root, "expected a link to a file, or to a folder without links")
            count, size = count + 1, size + path.lstat().st_size
            if count > MAX_ENTRIES or size > MAX_BYTES:
                raise TaskError(f"expected at most {MAX_ENTRIES:,} files of {MAX_BYTES:,} bytes in all, got more")
    shutil.copytree(root, target, copy_function=shutil.copy)


def _entries(folder: Path) -> Iterator[Path]:
    """Yields files and links below a folder, in order; links are not followed."""
    for directory, folders, names in os.walk(folder):
        folders.sort()
        links = [name for name in folders if Path(directory, name).is_symlink()]
        yield from (Path(directory, name) for name in sorted([*names, *links]))


def _target(link: Path, root: Path) -> Path:
    """Returns the target of a link in the end."""
    text = link.readlink()
    if text.is_absolute():
        raise _refusal(link, root, f"expected a relative link, got one to {str(text)!r:.200}")
    outside = _refusal(link, root, f"expected a link that stays inside the task, got one to {str(text)!r:.200}")
    if not Path(os.path.normpath(link.parent / text)).is_relative_to(root):
        raise outside
    try:
        target = Path(os.path.realpath(link, strict=True))
    except OSError as error:
        complaint = f"expected a link to something, got one to {str(text)!r:.200}: {error.strerror}"
        raise _refusal(link, root, complaint) from None
    if not target.is_relative_to(root):
        raise outside
    return target


def _refusal(entry: Path, root: Path, complaint: str) -> TaskError:
    return TaskError(f"{entry.relative_to(root).as_posix()}: {complaint}")
