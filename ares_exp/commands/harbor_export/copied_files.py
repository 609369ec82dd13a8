"""Files of a run that are copied into an export: regular ones alone, no links followed, secrets masked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ares_exp.records.secrets import KnownSecrets, mask_known_secrets

MAX_MASKED_BYTES = 64 * 2**20
"""Larger files are copied as they are: the run has masked the task's own secrets in them."""


def copy_tree(source: Path, target: Path) -> None:
    """Copies the regular files below a folder; there may be none.

    Args:
        source: The folder, with no link in its path: behind one, nothing is copied.
        target: Where they go.

    Raises:
        OSError: One cannot be read or written.
    """
    if source.resolve() != source:
        return
    for directory, _, names in os.walk(source):
        here = target / Path(directory).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in names:
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
