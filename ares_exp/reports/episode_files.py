"""The files of an episode that its page shows: the verifier's files, other files, and changes between snapshots.

The run directory is untrusted. Therefore, links are not followed, and pipes and devices are not opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Any

from ares_exp.containers.filesystem.delta import Delta, Entry
from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.errors import SnapshotError
from ares_exp.records.run_dir import DIRECTORY_FLAGS, RunDir, open_beneath
from ares_exp.snapshots.snapshot import step_of
from ares_exp.snapshots.store import SnapshotStore

HEAD_BYTES, TAIL_BYTES = 96 * 2**10, 32 * 2**10
MAX_BYTES = 2**20
"""Maximum number of characters of all file texts of an episode. Beyond it, files are listed without text."""
MAX_FILES = 200
SHOWN_FOLDERS = ("verifier",)
SHOWN_NAMES = ("manifest.json",)


def episode_files(run_dir: Path, episode_id: str) -> list[dict[str, Any]]:
    """Lists the files of an episode, with the text of the verifier's files and of `manifest.json`.

    Returns:
        A mapping per file with `name`, `size` and, if its content is shown, `text`. If the middle of a long text is
        omitted, `left_out` is the number of omitted bytes.
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
    """Yields each file of an episode: its path in the episode's folder, a descriptor of its parent folder, its name."""
    try:
        with open_beneath(root, f"/{episode_id}") as folder:
            for path, folders, names, inner in os.fwalk(".", dir_fd=folder, follow_symlinks=False):
                folders.sort()
                for name in sorted(names):
                    yield os.path.normpath(f"{path}/{name}"), inner, name
    except (OSError, UnicodeEncodeError):  # a lone surrogate cannot be part of a path
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


MAX_SNAPSHOTS = 300
MAX_PATHS = 100
"""Maximum number of changed paths that are listed per step. The others are only counted."""
MAX_TEXT_BYTES = 64 * 2**10
MAX_DIFF_LINES = 200
MAX_DIFFS = 400
"""Maximum number of diffs that are computed per episode."""


def file_changes(run_dir: Path, episode_id: str) -> dict[int, dict[str, Any]]:
    """Finds the files in the container that changed between the snapshots of an episode.

    Each snapshot is compared with the previous one. The first is compared with the container's initial files.

    Returns:
        A dictionary from step to changes. `paths` lists the changed paths, each with `path`, `change` (see `_change`),
        `kind`, `size` and, for text files, `diff`. `more` is the number of omitted paths, and `since` is the step of
        the previous snapshot. For an unreadable snapshot, the only key is `problem`, an error message.
    """
    store = SnapshotStore(RunDir(run_dir).snapshots)
    try:
        steps = {name: step_of(name) for name in store.ids()}
    except SnapshotError:
        return {}
    found = {place[1]: name for name, place in steps.items() if place is not None and place[0] == episode_id}
    told: dict[int, dict[str, Any]] = {}
    before, since, diffs = Delta("", {}), None, _Diffs(store.objects)
    for step in sorted(found)[:MAX_SNAPSHOTS]:
        try:
            now = get_delta(store.objects, store.get(found[step]).filesystem)
        except SnapshotError as error:
            told[step] = {"problem": str(error)}
            continue
        told[step] = {"since": since, **_changes(before.entries, now.entries, diffs)}
        before, since = now, step
    return told


def _changes(before: Mapping[str, Entry], now: Mapping[str, Entry], diffs: _Diffs) -> dict[str, Any]:
    paths = sorted(path for path in {*before, *now} if _change(before.get(path), now.get(path)) is not None)
    shown = [_told(path, before.get(path), now.get(path), diffs) for path in paths[:MAX_PATHS]]
    return {"paths": shown, "more": max(len(paths) - MAX_PATHS, 0)}


def _change(old: Entry | None, new: Entry | None) -> str | None:
    """Returns `added`, `changed`, `removed` or `permissions`; `None` if nothing or only a time changed."""
    if new is None or new.kind == "whiteout":
        return "removed" if old is None or old.kind != "whiteout" else None
    if old is None or old.kind == "whiteout":
        return None if new.kind == "directory" and old is None else "added"
    if (old.kind, old.size, old.chunks, old.target) != (new.kind, new.size, new.chunks, new.target):
        return "changed"
    return "permissions" if (old.mode, old.uid, old.gid) != (new.mode, new.uid, new.gid) else None


def _told(path: str, old: Entry | None, new: Entry | None, diffs: _Diffs) -> dict[str, Any]:
    entry = new or old
    assert entry is not None, "a path without an entry did not change"
    told: dict[str, Any] = {"path": path, "change": _change(old, new), "kind": entry.kind, "size": entry.size}
    if entry.kind == "symlink":
        told["target"] = entry.target
    if (diff := diffs.between(old, new)) is not None:
        told["diff"] = diff
    return told


class _Diffs:
    """Creates the diffs of one episode, up to the number `MAX_DIFFS`."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._left = MAX_DIFFS

    def between(self, old: Entry | None, new: Entry | None) -> str | None:
        """Returns a diff of two versions; `None` if they are equal, long or binary, or if `MAX_DIFFS` is reached."""
        files = [entry for entry in (old, new) if entry is not None and entry.kind == "file"]
        if not files or self._left <= 0:
            return None
        was, now = self._text(old), self._text(new)
        if was is None or now is None:
            return None
        self._left -= 1
        lines = list(unified_diff(was.splitlines(), now.splitlines(), n=2, lineterm=""))[2:]
        more = len(lines) - MAX_DIFF_LINES
        return "\n".join([*lines[:MAX_DIFF_LINES], *([f"[… {more:,} lines …]"] if more > 0 else [])]) or None

    def _text(self, entry: Entry | None) -> str | None:
        """Returns the text of a version of a file: empty if it is not a file, `None` if it is too long or not text."""
        if entry is None or entry.kind != "file":
            return ""
        if entry.size > MAX_TEXT_BYTES or None in entry.chunks:
            return None
        try:
            data = b"".join(self._objects.get(chunk) for chunk in entry.chunks if chunk is not None)
            return None if b"\0" in data else data.decode()
        except (SnapshotError, UnicodeDecodeError):
            return None
