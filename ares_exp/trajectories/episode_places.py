"""Places of episodes: a run directory, a folder of runs, a folder of files, or a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.run_dir import EPISODES, SWEEP_RECORD
from ares_exp.trajectories.files.episode_file import SHARED_SUFFIXES, is_shared
from ares_exp.trajectories.files.line_file import ZSTD

SUFFIXES = (".json", f".json{ZSTD}", *SHARED_SUFFIXES)
"""Ends of the names of episode files."""

RUN_FOLDERS = ("trajectories",)
RUN_FILES = ("trajectories.jsonl", f"trajectories.jsonl{ZSTD}")
"""Where the collectors write in a run directory (see `conf/collector`)."""

MAX_DEPTH = 4
"""How far below a folder runs are looked for."""


def find_files(path: Path) -> list[list[Path]]:
    """Finds the episode files at `path`: one list for each run, one for a folder's own.

    The same episode may be in several files of a list. Of those in which it has ended, the first one counts.

    Raises:
        TrajectoryFormatError: There is no such path, or it cannot be read.
    """
    try:
        if path.is_file():
            if suffix_of(path) is None:
                raise TrajectoryFormatError(
                    f"{path}: expected the name of an episode file to end with one of {', '.join(SUFFIXES)}."
                )
            return [[path]]
        if path.exists() and not path.is_dir():
            raise TrajectoryFormatError(f"{path}: expected a file or a folder, found a pipe or a device.")
        if is_run(path):
            return [_in_run(path)]
        own = [] if (path / SWEEP_RECORD).is_file() else _in_folder(path)  # a sweep has JSON that is no episodes
        return [_in_order(own), *(_in_run(run) for run in runs_below(path, MAX_DEPTH))]
    except OSError as error:
        raise TrajectoryFormatError(f"{error.filename or path}: {error.strerror}.") from error


def suffix_of(path: Path) -> str | None:
    """Returns the end of a file's name that identifies its format, such as `.json.zst`; `None` for another file."""
    return next((suffix for suffix in SUFFIXES if path.name.endswith(suffix) and path.name != suffix), None)


def id_by_name(path: Path) -> str:
    """Returns the id of the episode in a file of one, as its name tells it."""
    return path.name.removesuffix(suffix_of(path) or "")


def is_run(folder: Path) -> bool:
    """Returns whether a folder is a run directory."""
    return any((folder / name).exists() for name in (EPISODES, *RUN_FOLDERS, *RUN_FILES))


def runs_below(folder: Path, depth: int, seen: set[Path] | None = None) -> Iterator[Path]:
    """Yields the run directories below a folder, by name, so many levels deep; none within another, and each once."""
    seen = set() if seen is None else seen
    for name in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != "."):
        below = (folder / name).resolve()
        if below in seen:
            continue
        seen.add(below)
        if is_run(below):
            yield folder / name
        elif depth > 1:
            yield from runs_below(folder / name, depth - 1, seen)


def _in_run(run: Path) -> list[Path]:
    files = [path for path in map(run.joinpath, RUN_FILES) if path.is_file()]
    for folder in map(run.joinpath, RUN_FOLDERS):
        files += _in_folder(folder) if folder.is_dir() else []
    return _in_order(files)


def _in_folder(folder: Path) -> list[Path]:
    names = (entry.name for entry in os.scandir(folder) if entry.name[0] != "." and entry.is_file())
    return [path for path in map(folder.joinpath, names) if suffix_of(path) is not None]


def _in_order(files: list[Path]) -> list[Path]:
    """Sorts files by precedence: JSON before JSON Lines, and compressed files first, because they are complete."""
    return sorted(files, key=lambda path: (is_shared(path), path.suffix != ZSTD, path))
