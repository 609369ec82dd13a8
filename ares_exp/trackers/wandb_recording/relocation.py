"""Run directories that were moved: W&B notes the files of artifacts by absolute paths, and drops what is not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ares_exp.run_dir import atomic_file
from ares_exp.trackers.wandb_recording.record_file import read_records, write_records


@dataclass(frozen=True, slots=True)
class Relocation:
    """What became of the files that a session's artifacts name.

    Attributes:
        moved: How many are now named by where they are.
        missing: The artifacts that name files which are nowhere to be found, with how many.
    """

    moved: int
    missing: dict[str, int]


def relocate(session: Path, run_dir: Path) -> Relocation:
    """Has a session's `.wandb` file name the files of its artifacts by where they are in the run directory now.

    The file is written anew, atomically, if anything was moved, and is left alone otherwise.

    Raises:
        ValueError: It is broken.
        OSError: It cannot be read or written.
    """
    moved, missing = 0, dict[str, int]()
    for artifact, entry in _entries(read_records(session)):
        place = _place(entry, run_dir)
        if place is None:
            missing[artifact.name] = missing.get(artifact.name, 0) + 1
        elif place != entry.local_path:
            moved += 1
    if moved:
        with atomic_file(session) as file:
            write_records(file, _relocated(session, run_dir))
    return Relocation(moved, missing)


def _relocated(session: Path, run_dir: Path) -> Iterator[Any]:
    for record in read_records(session):
        for _, entry in _entries(iter((record,))):
            entry.local_path = _place(entry, run_dir) or entry.local_path
        yield record


def _entries(records: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Every file that an artifact has here, with its artifact."""
    for record in records:
        if record.WhichOneof("record_type") == "artifact":
            yield from ((record.artifact, entry) for entry in record.artifact.manifest.contents if entry.local_path)


def _place(entry: Any, run_dir: Path) -> str | None:
    """Where the file is: in the run directory, at the end of the path that was noted; else where it was noted."""
    root = run_dir.resolve()
    parts = PurePath(entry.local_path).parts
    for first in range(1, len(parts)):
        path = root.joinpath(*parts[first:])
        if path.is_file() and path.stat().st_size == entry.size and path.resolve().is_relative_to(root):
            return str(path)
    noted = Path(entry.local_path)
    return entry.local_path if noted.is_file() and noted.stat().st_size == entry.size else None
