"""Run directories that were moved: W&B notes the files of artifacts by absolute paths, and drops what is not there."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ares_exp.run_dir import atomic_file, open_regular
from ares_exp.trackers.wandb_recording.record_file import read_records, write_records

NOWHERE = "/dev/null/"
"""Before the path of a file that is not to be uploaded: nothing can ever be there."""


@dataclass(frozen=True, slots=True)
class Relocation:
    """What became of the files that a session's artifacts name.

    Attributes:
        moved: How many are now named by where they are.
        missing: The artifacts that name files which are nowhere to be found, or are not theirs, with their paths.
    """

    moved: int
    missing: dict[str, list[str]]


def relocate(session: Path, run_dir: Path) -> Relocation:
    """Has a session's `.wandb` file name the files of its artifacts by where they are in the run directory now.

    The `.wandb` file may come from anybody, and must not have any file of this machine's uploaded: one outside of the
    run directory is taken only if it has the digest that was noted, so that who made the note had its content.

    The file is written anew, atomically, if anything is to be named otherwise, and is left alone if not.

    Raises:
        ValueError: It is broken, or has its artifacts' files listed elsewhere.
        OSError: It cannot be read or written.
    """
    moved, is_right, missing = 0, True, dict[str, list[str]]()
    for artifact, entry in _entries(read_records(session)):
        place = _place(entry, run_dir)
        is_right &= entry.local_path == (place or _nowhere(entry))
        if place is None:
            missing.setdefault(artifact.name, []).append(_noted(entry))
        elif place != entry.local_path:
            moved += 1
    if not is_right:
        with atomic_file(session) as file:
            write_records(file, _relocated(session, run_dir))
    return Relocation(moved, missing)


def _relocated(session: Path, run_dir: Path) -> Iterator[Any]:
    for record in read_records(session):
        for _, entry in _entries(iter((record,))):
            entry.local_path = _place(entry, run_dir) or _nowhere(entry)
        yield record


def _entries(records: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Every file that an artifact has here, with its artifact."""
    for record in records:
        if record.HasField("artifact"):
            artifact = record.artifact
        elif record.HasField("request") and record.request.HasField("log_artifact"):
            artifact = record.request.log_artifact.artifact
        else:
            continue
        if artifact.manifest.manifest_file_path:
            raise ValueError(
                f"The artifact {artifact.name} has its files listed in another file, which is not followed"
            )
        yield from ((artifact, entry) for entry in artifact.manifest.contents if entry.local_path)


def _place(entry: Any, run_dir: Path) -> str | None:
    """Where the file is: in the run directory, at the end of the path that was noted; else where it was noted."""
    root, noted = run_dir.resolve(), _noted(entry)
    parts = PurePath(noted).parts
    for first in range(1, len(parts)):
        path = root.joinpath(*parts[first:])
        if path.is_file() and path.stat().st_size == entry.size and path.resolve().is_relative_to(root):
            return str(path)
    return noted if _has_noted_content(Path(noted), entry) else None


def _has_noted_content(path: Path, entry: Any) -> bool:
    """Whether the file has the digest that W&B noted of it: MD5, in base64."""
    digest = hashlib.md5(usedforsecurity=False)
    try:
        with open_regular(path) as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
    except OSError:
        return False
    return bool(entry.digest == base64.b64encode(digest.digest()).decode())


def _noted(entry: Any) -> str:
    return str(entry.local_path).removeprefix(NOWHERE)


def _nowhere(entry: Any) -> str:
    return NOWHERE + _noted(entry)
