"""Places of episodes: a run directory, a folder of runs, a folder of files, or a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.run_dir import EPISODES, SWEEP_RECORD
from ares_exp.trajectories.files.episode_file import PARTIAL
from ares_exp.trajectories.files.formats import FORMATS, format_of, suffix_of
from ares_exp.trajectories.files.line_file import ZSTD

RUN_FOLDERS = ("trajectories",)
RUN_FILES = ("trajectories.jsonl", f"trajectories.jsonl{ZSTD}")
"""Where the collectors write in a run directory (see `conf/collector`)."""

RECOVERED = ".recovered"
MAX_DEPTH = 4
"""How far below a folder runs are looked for."""


def find_files(path: Path) -> list[list[Path]]:
    """Finds the episode files at `path`, partial ones included: one list for each run, one for a folder's own.

    The same episode may be in several files of a list; the first of them is the one that counts: the format of most
    detail goes first, partial files go last. A file is left out when a newer one has what could be recovered of it.

    Raises:
        TrajectoryFormatError: There is no such path, or it cannot be read.
    """
    try:
        if path.is_file():
            return [[path]]
        if path.exists() and not path.is_dir():
            raise TrajectoryFormatError(f"{path}: expected a file or a folder, found a pipe or a device.")
        if is_run(path):
            return [_in_run(path)]
        own = [] if (path / SWEEP_RECORD).is_file() else _in_folder(path)  # a sweep has JSON that is no episodes
        return [_in_order(own), *(_in_run(run) for run in runs_below(path, MAX_DEPTH))]
    except OSError as error:
        raise TrajectoryFormatError(f"{error.filename or path}: {error.strerror}.") from error


def recovered_path(path: Path) -> Path:
    """Returns the path for the good part of a broken file: beside it, in the same format."""
    suffix = suffix_of(path) or ""
    return path.with_name(f"{path.name.removesuffix(suffix)}{RECOVERED}{suffix}")


def is_partial(path: Path) -> bool:
    """Returns whether a file, by its name, is that of an unfinished episode."""
    return path.name.endswith(PARTIAL)


def finished_path(path: Path) -> Path:
    """Returns the name of a partial file after its episode has ended."""
    return path.with_name(path.name.removesuffix(PARTIAL))


def id_by_name(path: Path) -> str:
    """Returns the id of the episode in a file of one, as its name tells it."""
    return path.name.removesuffix(PARTIAL).removesuffix(suffix_of(path) or "")


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
    files = [path for file in map(run.joinpath, RUN_FILES) for path in (file, recovered_path(file)) if path.is_file()]
    for folder in map(run.joinpath, RUN_FOLDERS):
        files += _in_folder(folder) if folder.is_dir() else []
    return _in_order(files)


def _in_folder(folder: Path) -> list[Path]:
    names = (entry.name for entry in os.scandir(folder) if entry.name[0] != "." and entry.is_file())
    return [path for path in map(folder.joinpath, names) if suffix_of(path) is not None]


def _in_order(files: list[Path]) -> list[Path]:
    """Sorts files by precedence, without those of which a newer one has the good part."""
    formats, there = list(FORMATS.values()), set(files)
    left = [path for path in files if recovered_path(path) not in there or not is_newer(recovered_path(path), path)]
    return sorted(left, key=lambda path: (is_partial(path), formats.index(format_of(path)), path))


def is_newer(path: Path, than: Path) -> bool:
    """Returns whether a file was written when, or after, another was."""
    return path.stat().st_mtime_ns >= than.stat().st_mtime_ns
