"""The formats of episode files: JSON and JSON Lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ares_exp.errors import TrajectoryFormatError, UserError
from ares_exp.trajectories.files.episode_file import dump_episode, load_episode, read_episodes
from ares_exp.trajectories.files.line_file import ZSTD, write_lines
from ares_exp.trajectories.records import EpisodeTrajectory

Episodes = Iterable[EpisodeTrajectory]


@dataclass(frozen=True, slots=True)
class EpisodeFormat:
    """One format.

    Attributes:
        name: Of the format.
        suffixes: Ends of the names of its files; new files get the first one, compressed ones the last.
        read: Yields the episodes of a file one after the other. Raises `TrajectoryFormatError` if the file is broken,
            with the path and the position.
        write: Writes a file atomically. Raises `UserError` for several episodes if the format has one per file.
    """

    name: str
    suffixes: tuple[str, ...]
    read: Callable[[Path], Iterator[EpisodeTrajectory]]
    write: Callable[[Path, Episodes], None]


def _read_json(path: Path) -> Iterator[EpisodeTrajectory]:
    yield load_episode(path)


def _write_json(path: Path, episodes: Episodes) -> None:
    write_lines(path, dump_episode(_only(path, episodes)))


def _write_jsonl(path: Path, episodes: Episodes) -> None:
    write_lines(path, (line for episode in episodes for line in dump_episode(episode, shared=True)))


def _only(path: Path, episodes: Episodes) -> EpisodeTrajectory:
    """Returns the one episode that a file can take."""
    first, *more = islice(episodes, 2)
    if more:
        raise UserError(f"Expected one episode for the file {path}, got more. Use a `.jsonl` file.")
    return first


_FORMATS = (
    EpisodeFormat("json", (".json", f".json{ZSTD}"), _read_json, _write_json),
    EpisodeFormat("jsonl", (".jsonl", f".jsonl{ZSTD}"), read_episodes, _write_jsonl),
)
FORMATS = {item.name: item for item in _FORMATS}


def suffix_of(path: Path) -> str | None:
    """Returns the suffix that tells a file's format, e.g. `.json.zst`; `None` for an unknown one."""
    name = path.name
    suffixes = [suffix for item in _FORMATS for suffix in item.suffixes if name.endswith(suffix) and name != suffix]
    return max(suffixes, key=len, default=None)


def format_of(path: Path) -> EpisodeFormat:
    """Returns the format of a file, by its name.

    Raises:
        TrajectoryFormatError: The name tells none.
    """
    suffix = suffix_of(path)
    if suffix is None:
        known = ", ".join(suffix for item in _FORMATS for suffix in item.suffixes)
        raise TrajectoryFormatError(f"{path}: expected the name of an episode file to end with one of {known}.")
    return next(item for item in _FORMATS if suffix in item.suffixes)
