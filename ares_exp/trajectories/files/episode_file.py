"""The formats of trajectory files (schema version 3): JSON files with one episode, and JSON Lines files with many.

Both formats consist of the same records: `start` when the episode starts, `step` for each step, and `end` when the
episode has ended. Each record is one line, so that you can read a file while it grows, or after the writing process was
killed.

When the last line has been written, a JSON file as a whole is one JSON object:

```
{"schema_version": 3, "episode_id": …, "task_name": …, "start_time": …, "metadata": {…}, "steps": [
{"step_index": 0, …}
,{"step_index": 1, …}
], "end_time": …, "total_reward": …, "num_steps": …, "truncated": …, "outcome": …, "error": null}
```

Each line of a JSON Lines file is a JSON object with the `type` of the record and the `episode_id`. Lines of different
episodes may be mixed. If an episode has a second `start` before its `end`, the records before the second `start` are
ignored. Empty lines are also ignored. A writer adds a newline after an incomplete line of a killed process, which can
leave an empty line.

`step_encoding` describes the format of a step. The other fields are the fields of `EpisodeTrajectory`. If the `end` is
missing, the episode is read with its complete steps. It then has the outcome `lost`, unless its LAST step was recorded.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ares_exp.errors import TrajectoryFormatError, TrajectoryVersionError
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.records.run_dir import append_durably, dump_json
from ares_exp.records.validation import validated
from ares_exp.trajectories.files.line_file import ZSTD, Line, first_and_last_line, read_lines, read_rest, write_lines
from ares_exp.trajectories.files.step_encoding import StepDecoder, StepEncoder
from ares_exp.trajectories.records import BROKEN, EpisodeTrajectory, StepRecord, ending, total_reward, what_broke

if TYPE_CHECKING:
    from ares_exp.trajectories.collector import EpisodeHandle

SHARED_SUFFIXES = (".jsonl", f".jsonl{ZSTD}")
"""Suffixes of JSON Lines files."""
STEPS = '"steps": ['
MAX_PROBLEMS = 10
"""Maximum number of invalid records that are described for one file. Further ones are only counted."""
_STEP = re.compile(r'\{"type": "step", "episode_id": ("(?:[^"\\]|\\.)*"), ')
"""Matches the start of a step's line in a JSON Lines file. Readers use it to find the episode id without parsing the
whole line as JSON."""


def start_line(started: EpisodeHandle | EpisodeTrajectory, *, shared: bool = False) -> str:
    """Returns the first line of an episode. `shared` selects the JSON Lines format instead of the JSON format."""
    fields = {"schema_version": SCHEMA_VERSION}
    fields |= {name: getattr(started, name) for name in ("episode_id", "task_name", "start_time", "metadata")}
    return _shared_line("start", started.episode_id, fields) if shared else f"{dump_json(fields)[:-1]}, {STEPS}\n"


def step_line(episode_id: str, encoded: Mapping[str, Any], *, first: bool, shared: bool = False) -> str:
    """Returns the line of a step. `encoded` is the result of `StepEncoder.encode`."""
    return _shared_line("step", episode_id, encoded) if shared else f"{'' if first else ','}{dump_json(encoded)}\n"


def end_line(trajectory: EpisodeTrajectory, *, shared: bool = False) -> str:
    """Returns the last line of an episode. Omits `unfinished_step` if it is `None`, and `rewards` if there are none."""
    names = ("end_time", "total_reward", "num_steps", "truncated", "outcome")
    fields: dict[str, Any] = {name: getattr(trajectory, name) for name in names}
    fields["error"] = trajectory.error.to_dict() if trajectory.error is not None else None
    if trajectory.unfinished_step is not None:
        fields["unfinished_step"] = trajectory.unfinished_step.to_dict()
    if trajectory.rewards:
        fields["rewards"] = trajectory.rewards
    return _shared_line("end", trajectory.episode_id, fields) if shared else f"], {dump_json(fields)[1:]}\n"


def dump_episode(trajectory: EpisodeTrajectory, *, shared: bool = False) -> Iterator[str]:
    """Yields all lines of a complete episode: its first line, its steps, and its last line."""
    encoder = StepEncoder()
    yield start_line(trajectory, shared=shared)
    for number, record in enumerate(trajectory.steps):
        yield step_line(trajectory.episode_id, encoder.encode(record)[1], first=number == 0, shared=shared)
    yield end_line(trajectory, shared=shared)


def _shared_line(kind: str, episode_id: str, data: Mapping[str, Any]) -> str:
    return f"{dump_json({'type': kind, 'episode_id': episode_id, **data})}\n"


@dataclass(slots=True)
class FoundEpisode:
    """An episode that is being read from a file.

    Attributes:
        head: Fields of the episode's first line.
        offsets: Offsets of the episode's lines, in bytes of the uncompressed text.
        steps: Steps that were read so far; empty if steps are not decoded.
        ended: The episode; `None` until its `end` is read. It has no steps if steps are not decoded.
    """

    head: Mapping[str, Any]
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    steps: list[StepRecord] = field(default_factory=list)
    ended: EpisodeTrajectory | None = None
    _decoder: StepDecoder = field(default_factory=StepDecoder)
    _is_broken: bool = False

    @property
    def trajectory(self) -> EpisodeTrajectory:
        """The episode, with the steps so far if its `end` is missing. Raises `ValueError` if `head` is invalid."""
        return self.ended or _lost(self.head, self.steps)

    def take(self, kind: str, text: str, *, with_steps: bool) -> None:
        """Adds the record with the JSON text `text`. `kind` is `step` or `end`.

        If the record is invalid, raises an exception of a type in `BROKEN`, and ignores all later records of the
        episode.
        """
        if self._is_broken:
            return
        try:
            if kind == "end":
                data = {**self.head, **json.loads(text)}
                headers = {**data, "steps": ()}
                self.ended = whole_episode(data, self.steps) if with_steps else validated(EpisodeTrajectory, headers)
            elif with_steps:
                self.steps.append(self._decoder.decode(json.loads(text)))
        except BROKEN:
            self._is_broken = True
            raise


def _lost(head: Mapping[str, Any], steps: Sequence[StepRecord]) -> EpisodeTrajectory:
    """Creates the trajectory of an episode whose `end` is missing. Raises `ValueError` if `head` is invalid."""
    last = steps[-1] if steps else None
    outcome = Outcome.LOST
    error: ErrorInfo | None = ErrorInfo("lost", f"the end is missing; the record has {len(steps)} complete steps")
    if last is not None and last.step_type == "LAST":
        outcome, error, _ = ending(last)
    data = {
        **head,
        "end_time": last.timestamp if last is not None else head["start_time"],
        "total_reward": total_reward(steps),
        "num_steps": len(steps),
        "truncated": outcome is Outcome.TRUNCATED,
        "outcome": outcome,
        "error": error,
    }
    return whole_episode(data, steps)


def is_shared(path: Path) -> bool:
    """Returns whether a file is a JSON Lines file according to its name."""
    return path.name.endswith(SHARED_SUFFIXES)


def find_headers(path: Path, *, problems: list[str] | None = None) -> Iterator[FoundEpisode]:
    """Yields the episodes of a file in the order of `find_episodes`, without the steps of ended episodes."""
    if is_shared(path):
        yield from find_episodes(path, problems=problems, with_steps=False)
    elif (found := _header_of_ends(path)) is not None:
        yield found
    else:
        yield from find_episodes(path, problems=problems)


def _header_of_ends(path: Path) -> FoundEpisode | None:
    """Reads an ended episode from the first and last line of a JSON file, without steps; `None` if impossible."""
    try:
        first, last = first_and_last_line(path)
        if not _is_head(first.text) or not last.text.startswith("]"):
            return None
        found = FoundEpisode(_head(_records_of_json(first)[2]))
        found.take("end", _records_of_json(last)[2], with_steps=False)
    except (OSError, *BROKEN):
        return None
    return found


def find_episodes(
    path: Path, *, problems: list[str] | None = None, offsets: Sequence[int] | None = None, with_steps: bool = True
) -> Iterator[FoundEpisode]:
    """Yields the episodes of a file, in the order in which they ended. Episodes whose `end` is missing come last.

    Args:
        path: The file.
        problems: List to which a sentence for each invalid record is added. The episode of the record then has only its
            earlier steps and the outcome `lost`. If `problems` is `None`, the first invalid record raises an error.
        offsets: Offsets of the lines to read. By default, all lines are read.
        with_steps: Whether steps are decoded.

    Raises:
        TrajectoryFormatError: The file cannot be read, or a record is invalid and `problems` is `None`. The message
            names the file and the position.
        TrajectoryVersionError: The file has another schema version, and `problems` is `None`.
    """
    episodes: dict[str, FoundEpisode] = {}
    line = Line(0, 1, "")
    count = 0

    def report(error: BaseException, place: str) -> None:
        nonlocal count
        count += 1
        text = f"{path}{place}: {what_broke(error)}."
        if problems is None:
            kind = TrajectoryVersionError if isinstance(error, TrajectoryVersionError) else TrajectoryFormatError
            raise kind(text) from error
        if count <= MAX_PROBLEMS:
            problems.append(text)

    try:
        with read_lines(path, offsets=offsets) as lines:
            for line in lines:
                try:
                    if not line.offset and not is_shared(path) and not _is_head(line.text):
                        whole = EpisodeTrajectory.from_dict(_object(json.loads(line.text + read_rest(lines))))
                        yield FoundEpisode({}, ended=whole)
                    elif line.text != "\n":
                        yield from _take(line, path, episodes, with_steps=with_steps)
                except BROKEN as error:
                    if line.text.endswith("\n") or not line.offset:  # otherwise, the line is incomplete
                        report(error, f" {line.place}")
    except OSError as error:
        raise TrajectoryFormatError(f"{path}: {error.strerror or error}.") from error
    except TrajectoryFormatError:
        raise
    except ValueError as error:  # a line cannot be read, and neither can the lines after it
        report(error, "")
    if problems is not None and count > MAX_PROBLEMS:
        problems.append(f"{path}: {count - MAX_PROBLEMS} more lines are invalid.")
    yield from episodes.values()


def _take(line: Line, path: Path, episodes: dict[str, FoundEpisode], *, with_steps: bool) -> Iterator[FoundEpisode]:
    """Adds a line to its episode in `episodes`. If the line ends the episode, removes and yields the episode."""
    kind, episode_id, text = (_records_of_jsonl if is_shared(path) else _records_of_json)(line)
    if kind == "start":
        episodes[episode_id] = FoundEpisode(_head(text))
    elif kind not in ("step", "end"):
        raise ValueError(f"expected `type` to be start, step or end, got {kind!r:.80}")
    if (episode := episodes.get(episode_id)) is None:
        raise ValueError(f"the episode {episode_id!r:.80} has no `start` before this line, or has already ended")
    episode.offsets.append(line.offset)
    if kind != "start":
        episode.take(kind, text, with_steps=with_steps)
    if episode.ended is not None:
        yield episodes.pop(episode_id)


def end_lost_episodes(path: Path) -> None:
    """Ends the episodes of a file whose process died, with the outcome `lost`. Blocking.

    A file with an invalid record is not changed. No other process may write to the file during the call.
    """
    problems: list[str] = []
    lost = [found for found in find_headers(path, problems=problems) if found.ended is None]
    if problems or not lost:
        return
    if not is_shared(path):
        write_lines(path, dump_episode(lost[0].trajectory))
        return
    read = [next(find_episodes(path, offsets=found.offsets)).trajectory for found in lost]
    _, last = first_and_last_line(path)
    if not last.text.endswith("\n"):
        os.truncate(path, last.offset)
    append_durably(path, "".join(end_line(episode, shared=True) for episode in read))


def _records_of_json(line: Line) -> tuple[str, str, str]:
    """Returns the type, an empty episode id, and the JSON text of the record in a line of a JSON file."""
    if not line.offset:
        return "start", "", f"{line.text.rstrip()}]}}"
    if line.text.startswith("]"):
        return "end", "", "{" + line.text.removeprefix("],")
    return "step", "", line.text.removeprefix(",")


def _records_of_jsonl(line: Line) -> tuple[str, str, str]:
    """Returns the type, the episode id and the JSON text of the record in a line of a JSON Lines file."""
    if step := _STEP.match(line.text):
        return "step", json.loads(step[1]), line.text
    data = _object(json.loads(line.text))
    kind, episode_id = data["type"], data["episode_id"]
    if not isinstance(kind, str) or not isinstance(episode_id, str):
        raise TypeError(f"expected `type` and `episode_id` to be strings, got {kind!r:.80} and {episode_id!r:.80}")
    return kind, episode_id, line.text


def _is_head(first_line: str) -> bool:
    return first_line.rstrip().endswith(STEPS)


def _head(text: str) -> dict[str, Any]:
    """Parses and validates the `start` record of an episode. Raises one of `BROKEN` if the record is invalid."""
    head = _object(json.loads(text))
    check_version(head.get("schema_version"))
    _lost(head, [])
    return head


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise TypeError(f"expected a JSON object, got {type(data).__name__}")
    return data


SCHEMA_VERSION = 3


def whole_episode(data: Mapping[str, Any], steps: Iterable[Any]) -> EpisodeTrajectory:
    """Creates an episode from its fields in JSON form and its steps, which are `StepRecord` objects or their JSON form.

    Raises:
        ValueError: A field is missing or invalid, or the number of steps is not `num_steps`.
    """
    episode = validated(EpisodeTrajectory, {**data, "steps": tuple(steps)})
    if episode.num_steps != len(episode.steps):
        raise ValueError(f"expected {episode.num_steps} steps, got {len(episode.steps)}")
    return episode


def check_version(version: Any) -> None:
    """Raises `TrajectoryVersionError` if `version` is not the current schema version."""
    if type(version) is not int or version != SCHEMA_VERSION:
        is_atif = isinstance(version, str) and version.startswith("ATIF")
        fix = "use the run that it was exported from" if is_atif else "use the version of ares_exp that wrote the file"
        raise TrajectoryVersionError(f"expected schema_version {SCHEMA_VERSION}, got {version!r:.80}: {fix}")
