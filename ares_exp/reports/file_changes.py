"""The files that changed from one snapshot of an episode to the next, as unified diffs where they are short texts."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Any

from ares_exp.containers.filesystem.delta import Delta, Entry
from ares_exp.containers.filesystem.delta_encoding import get_delta
from ares_exp.containers.filesystem.stored_objects import ObjectStore
from ares_exp.errors import SnapshotError
from ares_exp.records.run_dir import RunDir
from ares_exp.snapshots.snapshot_id import step_of
from ares_exp.snapshots.store import SnapshotStore

MAX_SNAPSHOTS = 300
MAX_PATHS = 100
"""Of one step; how many more there are is told."""
MAX_TEXT_BYTES = 64 * 2**10
MAX_DIFF_LINES = 200
MAX_DIFFS = 400
"""Of one episode."""


def file_changes(run_dir: Path, episode_id: str) -> dict[int, dict[str, Any]]:
    """Compares each snapshot of an episode with the one before it; the first one with what the container started with.

    Returns:
        By step: `paths`, each with `path`, `change` (added, changed, removed, permissions), `kind`, `size`, maybe
        `diff`; how many `more` there are; and `since`, the step of the snapshot before it. Of a snapshot that cannot be
        read `problem` tells why.
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
    """Returns what happened to a path, in a word; `None` for nothing that counts, as a directory's time."""
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
    """Makes the diffs of one episode, so many of them."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._left = MAX_DIFFS

    def between(self, old: Entry | None, new: Entry | None) -> str | None:
        """Returns the diff of two files; `None` where one is no short text, or nothing differs."""
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
        """Returns the text of a file, empty where there is none; `None` where it is long, or none."""
        if entry is None or entry.kind != "file":
            return ""
        if entry.size > MAX_TEXT_BYTES or None in entry.chunks:
            return None
        try:
            data = b"".join(self._objects.get(chunk) for chunk in entry.chunks if chunk is not None)
            return None if b"\0" in data else data.decode()
        except (SnapshotError, UnicodeDecodeError):
            return None
