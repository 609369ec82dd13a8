"""An index of the episodes in a JSON Lines file, made by one scan that reads none of their steps."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ares_exp.errors import TrajectoryFormatError, TrajectoryVersionError
from ares_exp.records.validation import validated
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.files.line_file import Line, read_lines
from ares_exp.trajectories.files.schema_versions import check_version
from ares_exp.trajectories.records import EpisodeTrajectory

MAX_PROBLEMS = 10
"""Wrong lines of a file that are described; further ones are counted: it may be a long file of another kind."""
STEP = re.compile(r'\{"type": "step", "episode_id": ("(?:[^"\\]|\\.)*"), ')
"""How the lines of steps begin, as this package writes them; another's are parsed."""


@dataclass(slots=True)
class IndexedEpisode:
    """Where one episode is.

    Attributes:
        offsets: Where its lines begin.
        head: What its `begin` line says.
        header: The episode without its steps; `None` while there is no end.
    """

    head: Mapping[str, Any]
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    header: EpisodeTrajectory | None = None


def index_jsonl(path: Path, *, problems: list[str] | None = None) -> Iterator[IndexedEpisode]:
    """Yields the episodes of a file as `read_jsonl` does, without their steps; those without an end come last.

    Args:
        path: The file.
        problems: Takes what is wrong with lines, in sentences: the others go on. Without it the first such thing is
            raised. What the steps are is not looked at.

    Raises:
        TrajectoryFormatError: The file cannot be read, or a line is wrong and there is no `problems`.
    """
    open_episodes: dict[str, IndexedEpisode] = {}
    line = Line(0, 1, "")
    wrong = 0

    def tell(what: str) -> None:
        nonlocal wrong
        wrong += 1
        if problems is None:
            remedy = f"`ares-exp recover {path}` keeps what is good."
            raise TrajectoryFormatError(f"{path} {line.place}: {what}. {remedy}")
        if wrong <= MAX_PROBLEMS:
            problems.append(f"{path} {line.place}: {what}.")

    try:
        with read_lines(path) as lines:
            for line in lines:
                if line.text == "\n":
                    continue
                try:
                    if (episode := _take(line, open_episodes)) is not None:
                        yield episode
                except BROKEN as error:
                    if problems is None and isinstance(error, TrajectoryVersionError):
                        raise TrajectoryVersionError(f"{path} {line.place}: {error}.") from None
                    if line.text.endswith("\n"):  # else it is being written just now, or was when a machine crashed
                        tell(what_broke(error))
    except OSError as error:
        raise TrajectoryFormatError(f"{path}: {error.strerror or error}.") from error
    except TrajectoryFormatError:
        raise
    except ValueError as error:  # of the reading of lines itself: nothing more can be read
        tell(str(error))
    if problems is not None and wrong > MAX_PROBLEMS:
        problems.append(f"{path}: {wrong - MAX_PROBLEMS} more lines are wrong.")
    yield from open_episodes.values()


def _take(line: Line, open_episodes: dict[str, IndexedEpisode]) -> IndexedEpisode | None:
    """Applies one line; returns the episode that it ended, if it did."""
    if step := STEP.match(line.text):
        kind, episode_id = "step", json.loads(step[1])
    else:
        data = json.loads(line.text)
        kind, episode_id = data["type"], data["episode_id"]
    if kind == "begin":
        check_version(data.get("schema_version"))
        open_episodes[episode_id] = IndexedEpisode(data)
    if (episode := open_episodes.get(episode_id)) is None:
        raise ValueError(f"episode {episode_id!r:.80} has not begun")
    episode.offsets.append(line.offset)
    if kind != "end":
        return None
    episode.header = validated(EpisodeTrajectory, {**episode.head, **data, "steps": ()})
    return open_episodes.pop(episode_id)
