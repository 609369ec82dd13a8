"""The JSON Lines file of many episodes (schema version 3): appendable, and readable while it grows.

Every line is a JSON object with an `episode_id` and a `type`; lines of different episodes may be mixed:

- `begin`: `schema_version`, `task_name`, `start_time`, `metadata`;
- `step`: the next step of that episode, as `step_encoding` tells;
- `end`: `end_time`, `total_reward`, `num_steps`, `truncated`, `outcome`, `error`.

A `begin` with the id of an episode that has not ended starts it over. An empty line means nothing: a writer that finds
the last line without its end, torn or just being written by another thread, ends it first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.errors import TrajectoryFormatError, TrajectoryVersionError
from ares_exp.records.run_dir import dump_json
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.files.episode_file import BegunEpisode, closing_fields, end_unfinished, opening_fields
from ares_exp.trajectories.files.line_file import Line, read_lines
from ares_exp.trajectories.files.schema_versions import check_version, whole_episode
from ares_exp.trajectories.files.step_encoding import StepDecoder, StepEncoder
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord


def begin_line(begun: BegunEpisode) -> str:
    """Returns the line that opens an episode."""
    return _line("begin", begun.episode_id, opening_fields(begun))


def step_line(episode_id: str, encoded: Mapping[str, Any]) -> str:
    """Returns the line of an encoded step."""
    return _line("step", episode_id, encoded)


def end_line(trajectory: EpisodeTrajectory) -> str:
    """Returns the line that ends an episode."""
    return _line("end", trajectory.episode_id, closing_fields(trajectory))


def jsonl_lines(trajectory: EpisodeTrajectory) -> Iterator[str]:
    """Yields all lines of one episode."""
    encoder = StepEncoder()
    yield begin_line(trajectory)
    for record in trajectory.steps:
        yield step_line(trajectory.episode_id, encoder.encode(record)[1])
    yield end_line(trajectory)


def read_jsonl(
    path: Path, *, problems: list[str] | None = None, offsets: Sequence[int] | None = None
) -> Iterator[EpisodeTrajectory]:
    """Yields the episodes of a file, each as soon as its end is read; those without an end come last.

    Args:
        path: The file.
        problems: Takes what is wrong with the file, in sentences: reading continues with the good lines, and episodes
            without an end, or with a broken step, are cut there. Without it the first such thing is raised.
        offsets: Where the only lines that are to be read begin; by default all are read.

    Raises:
        TrajectoryFormatError: The file cannot be read, or something in it is wrong and there is no `problems`.
        TrajectoryVersionError: The file has another schema version and there is no `problems`.
    """
    open_episodes: dict[str, _OpenEpisode] = {}
    line = Line(0, 1, "")

    def tell(what: str) -> None:
        error = TrajectoryFormatError(f"{path} {line.place}: {what}.")
        if problems is None:
            raise TrajectoryFormatError(f"{error} `ares-exp recover {path}` keeps what is good.")
        problems.append(str(error))

    try:
        with read_lines(path, offsets=offsets) as lines:
            for line in lines:
                if line.text == "\n":
                    continue
                try:
                    if (episode := _take(json.loads(line.text), open_episodes)) is not None:
                        yield episode
                except BROKEN as error:
                    if problems is None and isinstance(error, TrajectoryVersionError):
                        raise TrajectoryVersionError(f"{path} {line.place}: {error}.") from None
                    tell(what_broke(error))
    except OSError as error:
        raise TrajectoryFormatError(f"{path}: {error.strerror or error}.") from error
    except BROKEN as error:  # of the reading of lines itself: nothing more can be read
        if isinstance(error, TrajectoryFormatError):
            raise
        tell(what_broke(error))
    for episode_id, unfinished in open_episodes.items():
        if not unfinished.broken:
            tell(f"the end of episode {episode_id} is missing: {len(unfinished.steps)} steps are there")
        yield end_unfinished(unfinished.head, unfinished.steps)


def load_jsonl(path: Path) -> list[EpisodeTrajectory]:
    """Reads all episodes of a file. Raises `TrajectoryFormatError` as `read_jsonl` does."""
    return list(read_jsonl(path))


def salvage_jsonl(path: Path) -> tuple[list[EpisodeTrajectory], list[str]]:
    """Reads the good part of a file, and what is wrong. Raises `TrajectoryFormatError` for an unreadable one."""
    problems: list[str] = []
    return list(read_jsonl(path, problems=problems)), problems


@dataclass(slots=True)
class _OpenEpisode:
    head: Mapping[str, Any]
    steps: list[StepRecord] = field(default_factory=list)
    decoder: StepDecoder = field(default_factory=StepDecoder)
    broken: bool = False


def _take(data: Any, open_episodes: dict[str, _OpenEpisode]) -> EpisodeTrajectory | None:
    """Applies one line; returns the episode that it ended, if it did."""
    if not isinstance(data, dict):
        raise TypeError(f"expected a JSON object, got {type(data).__name__}")
    kind, episode_id = data["type"], data["episode_id"]
    if not isinstance(episode_id, str):
        raise TypeError(f"expected `episode_id` to be a string, got {episode_id!r:.80}")
    if kind == "begin":
        check_version(data.get("schema_version"))
        end_unfinished(data, [])  # refuses a head that is not sound
        open_episodes[episode_id] = _OpenEpisode(data)
        return None
    if kind not in ("step", "end"):
        raise ValueError(f"expected `type` to be begin, step or end, got {kind!r:.80}")
    if (episode := open_episodes.get(episode_id)) is None:
        raise ValueError(f"episode {episode_id!r:.80} has not begun")
    if episode.broken:
        return None
    try:
        if kind == "step":
            episode.steps.append(episode.decoder.decode(data))
            return None
        ended = whole_episode({**episode.head, **data}, episode.steps)
    except BROKEN:
        episode.broken = True
        raise
    del open_episodes[episode_id]
    return ended


def _line(kind: str, episode_id: str, data: Mapping[str, Any]) -> str:
    return f"{dump_json({'type': kind, 'episode_id': episode_id, **data})}\n"
