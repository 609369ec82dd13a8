"""What is known of a git repository without asking it: notes beside the fetched tasks, a file for each.

What a note says of a commit is so for ever. Which commit a branch or a tag was is what it was then.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ares_exp.run_dir import atomic_file
from ares_exp.tasks.task_sources.git_names import is_commit

_MAX_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class Sighting:
    """Which commit a branch or a tag was.

    Attributes:
        commit: All digits of it.
        time: When the repository said so, as text.
    """

    commit: str
    time: str


class RepositoryNotes:
    """The notes on one repository. Several processes may write at the same time; a broken note is none."""

    def __init__(self, folder: Path, url: str) -> None:
        """Reads nothing yet.

        Args:
            folder: Where all notes are; it is made with the first.
            url: The repository.
        """
        self._folder = folder
        self._url = url

    def sighting(self, ref: str | None) -> Sighting | None:
        """Which commit a ref was when it was last noted; `None` as a ref is the default branch."""
        match self._read("ref", ref):
            case {"commit": str(commit), "time": str(time)} if is_commit(commit):
                return Sighting(commit, time)
        return None

    def note_sighting(self, ref: str | None, commit: str) -> None:
        """Notes that a ref is this commit now."""
        time = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._write({"commit": commit, "time": time}, "ref", ref)

    def tree(self, commit: str) -> Mapping[str, str] | None:
        """As `GitCheckout.tree`, if it is noted."""
        found = self._read("tree", commit)
        if isinstance(found, dict) and all(_is_mode(mode) for mode in found.values()):
            return found
        return None

    def note_tree(self, commit: str, tree: Mapping[str, str]) -> None:
        """Notes the answer of `GitCheckout.tree`."""
        self._write(dict(tree), "tree", commit)

    def file(self, commit: str, path: str) -> bytes | None:
        """A file of a commit, if it is noted."""
        found = self._read("file", commit, path)
        try:
            return base64.b64decode(found, validate=True) if isinstance(found, str) else None
        except ValueError:
            return None

    def note_file(self, commit: str, path: str, data: bytes) -> None:
        """Notes a file of a commit."""
        self._write(base64.b64encode(data).decode(), "file", commit, path)

    def _place(self, *about: str | None) -> Path:
        identity = json.dumps([self._url, *about])
        return self._folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"

    def _read(self, *about: str | None) -> Any:
        try:
            with self._place(*about).open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
            return json.loads(data) if len(data) <= _MAX_BYTES else None
        except (OSError, ValueError, RecursionError):
            return None

    def _write(self, content: Any, *about: str | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self._place(*about), sync=False) as file:
            file.write(json.dumps(content).encode())


def _is_mode(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-7]{6}", value) is not None
