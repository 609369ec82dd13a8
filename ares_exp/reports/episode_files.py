"""Text files that an episode left in its run directory: what its verifier wrote, and the list of its artifacts.

The directory may come from anybody: links are not followed, and pipes and devices not opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ares_exp.records.run_dir import DIRECTORY_FLAGS, RunDir, open_beneath

HEAD_BYTES, TAIL_BYTES = 96 * 2**10, 32 * 2**10
MAX_BYTES = 2**20
"""Of all files of an episode together; further ones are named with their sizes."""
MAX_FILES = 200
SHOWN_FOLDERS = ("verifier",)
SHOWN_NAMES = ("manifest.json",)


def episode_files(run_dir: Path, episode_id: str) -> list[dict[str, Any]]:
    """Reads the files of an episode.

    Returns:
        `name`, `size`, and where it is shown `text`; of a long file its middle is left out, `left_out` bytes.
    """
    if episode_id in ("", ".", "..") or "/" in episode_id or "\0" in episode_id:
        return []
    found: list[dict[str, Any]] = []
    left = MAX_BYTES
    try:
        root = os.open(RunDir(run_dir).files, DIRECTORY_FLAGS)
    except OSError:
        return []
    try:
        for name, folder, file in _files(root, episode_id):
            *folders, last = name.split("/")
            is_shown = last in SHOWN_NAMES or any(one in SHOWN_FOLDERS for one in folders)
            told = _read(folder, file, left) if is_shown else _size(folder, file)
            if told is not None:
                left -= len(told.get("text", ""))
                found.append({"name": name, **told})
            if len(found) == MAX_FILES:
                break
    finally:
        os.close(root)
    return sorted(found, key=lambda one: ("text" not in one, "verifier" not in one["name"], one["name"]))


def _files(root: int, episode_id: str) -> Iterator[tuple[str, int, str]]:
    """Yields each file: its name from the episode's folder, a descriptor of its own folder, its name there."""
    try:
        with open_beneath(root, f"/{episode_id}") as folder:
            for path, folders, names, inner in os.fwalk(".", dir_fd=folder, follow_symlinks=False):
                folders.sort()
                for name in sorted(names):
                    yield os.path.normpath(f"{path}/{name}"), inner, name
    except (OSError, UnicodeEncodeError):  # half a surrogate pair names no folder
        return


def _size(folder: int, name: str) -> dict[str, Any] | None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return {"size": found.st_size} if stat.S_ISREG(found.st_mode) else None


def _read(folder: int, name: str, left: int) -> dict[str, Any] | None:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return None
        if left <= 0:
            return {"size": found.st_size}
        data = file.read(HEAD_BYTES + TAIL_BYTES + 1)
        if len(data) <= HEAD_BYTES + TAIL_BYTES:
            return {"size": found.st_size, "text": _text(data)}
        file.seek(max(found.st_size - TAIL_BYTES, HEAD_BYTES))
        tail = file.read(TAIL_BYTES)
    left_out = max(found.st_size - HEAD_BYTES - len(tail), 0)
    text = f"{_text(data[:HEAD_BYTES])}\n[… {left_out:,} bytes …]\n{_text(tail)}"
    return {"size": found.st_size, "text": text, "left_out": left_out}


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
