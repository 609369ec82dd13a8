"""Files of a run that are copied into an export: regular ones alone, no links followed, secrets masked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ares_exp.secrets import KnownSecrets, mask_known_secrets

MAX_MASKED_BYTES = 64 * 2**20
"""Larger files are copied as they are: where they came from, the task's own secrets were masked."""


def copy_tree(source: Path, target: Path) -> None:
    """Copies the regular files below a folder; there may be none.

    Raises:
        OSError: One cannot be read or written.
    """
    if source.is_symlink():
        return
    for directory, folders, names in os.walk(source):
        here = target / Path(directory).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        folders.sort()
        for name in sorted(names):
            copy_file(Path(directory, name), here / name)


def copy_file(source: Path, target: Path) -> None:
    """Copies a file, if it is a regular one.

    Raises:
        OSError: It cannot be read or written.
    """
    if source.is_symlink() or not source.is_file():
        return
    if source.stat().st_size > MAX_MASKED_BYTES:
        shutil.copyfile(source, target)
        return
    data = source.read_bytes()
    if KnownSecrets().found_in(data):
        data = mask_known_secrets(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    target.write_bytes(data)


def folder_names(folder: Path) -> Iterator[str]:
    """The names of the folders in a folder, links not among them; none where there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
