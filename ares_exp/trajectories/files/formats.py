"""The formats of episode files: two of records (JSON, JSON Lines), two of exports (Parquet, ATIF)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from ares_exp.errors import TrajectoryFormatError, UserError
from ares_exp.trajectories.exports.parquet_export import PARQUET_SUFFIX, read_parquet, write_parquet
from ares_exp.trajectories.files.episode_file import dump_episode, load_episode, read_episodes
from ares_exp.trajectories.files.line_file import ZSTD, write_lines
from ares_exp.trajectories.records import EpisodeTrajectory

Episodes = Iterable[EpisodeTrajectory]
Dropped = Counter[str]
"""What could not be held, in a sentence each, and of how many episodes."""


class Reader(Protocol):
    """Reads the episodes of a file."""

    def __call__(self, path: Path, *, dropped: Dropped | None = None) -> Iterator[EpisodeTrajectory]:
        """Yields one after the other; `dropped` counts what of the file a trajectory cannot hold.

        Raises:
            TrajectoryFormatError: The file is broken; the message names the path and the place.
        """
        ...


@dataclass(frozen=True, slots=True)
class EpisodeFormat:
    """One format.

    Attributes:
        name: As `convert --to` takes it.
        suffixes: What the names of its files end with; new files get the first one, compressed ones the last.
        many: Whether a file holds any number of episodes, or one.
        about: For people, in a few words.
        read: Reads a file.
        write: Writes a file, atomically, and tells what of the episodes it could not hold. Raises `UserError` for more
            than one episode where `many` is false.
        is_record: Whether runs are resumed, replayed and shown from its files.
    """

    name: str
    suffixes: tuple[str, ...]
    many: bool
    about: str
    read: Reader
    write: Callable[[Path, Episodes], Dropped]
    is_record: bool = False


def _read_json(path: Path, *, dropped: Dropped | None = None) -> Iterator[EpisodeTrajectory]:
    yield load_episode(path)


def _write_json(path: Path, episodes: Episodes) -> Dropped:
    write_lines(path, dump_episode(_only(path, episodes)))
    return Counter()


def _read_jsonl(path: Path, *, dropped: Dropped | None = None) -> Iterator[EpisodeTrajectory]:
    return read_episodes(path)


def _write_jsonl(path: Path, episodes: Episodes) -> Dropped:
    write_lines(path, (line for episode in episodes for line in dump_episode(episode, shared=True)))
    return Counter()


def _read_atif(path: Path, *, dropped: Dropped | None = None) -> Iterator[EpisodeTrajectory]:
    from ares_exp.trajectories.atif.reader import load_atif  # loads pydantic, which takes its time

    episode, lost = load_atif(path)
    if dropped is not None:
        dropped.update(lost)
    yield episode


def _write_atif(path: Path, episodes: Episodes) -> Dropped:
    from ares_exp.trajectories.atif.writer import write_atif

    return Counter(write_atif(path, _only(path, episodes)))


def _read_parquet(path: Path, *, dropped: Dropped | None = None) -> Iterator[EpisodeTrajectory]:
    return read_parquet(path)


def _write_parquet(path: Path, episodes: Episodes) -> Dropped:
    write_parquet(path, episodes)
    return Counter()


def _only(path: Path, episodes: Episodes) -> EpisodeTrajectory:
    """Returns the one episode that a file can take."""
    first, *more = islice(episodes, 2)
    if more:
        raise UserError(f"Expected one episode for the file {path}, got more. Name a folder: each gets a file there.")
    return first


_FORMATS = (
    EpisodeFormat(
        name="json",
        suffixes=(".json", f".json{ZSTD}"),
        many=False,
        about="one episode a file",
        read=_read_json,
        write=_write_json,
        is_record=True,
    ),
    EpisodeFormat(
        name="jsonl",
        suffixes=(".jsonl", f".jsonl{ZSTD}"),
        many=True,
        about="any number of episodes, a line a step",
        read=_read_jsonl,
        write=_write_jsonl,
        is_record=True,
    ),
    EpisodeFormat(
        name="parquet",
        suffixes=(PARQUET_SUFFIX,),
        many=True,
        about="any number of episodes, a row a step, for queries",
        read=_read_parquet,
        write=_write_parquet,
    ),
    EpisodeFormat(
        name="atif",
        suffixes=(".atif.json",),
        many=False,
        about="one episode a file, for other tools",
        read=_read_atif,
        write=_write_atif,
    ),
)
FORMATS = {item.name: item for item in _FORMATS}


def suffix_of(path: Path) -> str | None:
    """Returns the suffix that tells a file's format, e.g. `.atif.json`; `None` for an unknown one."""
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
