"""The JSON file of one episode (schema version 3).

It is one JSON object, laid out in lines so that it can be written during the episode and read without its steps:

```
{"schema_version": 3, "episode_id": …, "task_name": …, "start_time": …, "metadata": {…}, "steps": [
{"step_index": 0, …}
,{"step_index": 1, …}
], "end_time": …, "total_reward": …, "num_steps": …, "truncated": …, "outcome": …, "error": null}
```

A step is encoded as `step_encoding` tells; the other fields are those of `EpisodeTrajectory`. Until the episode has
ended the file is called `….partial` and lacks its last line; what there is of it can be read (`salvage_episode`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from ares_exp.errors import TrajectoryFormatError
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.records.run_dir import dump_json
from ares_exp.records.validation import validated
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.ending import ending
from ares_exp.trajectories.files.line_file import Line, TextTooLongError, first_and_last_line, read_lines, read_rest
from ares_exp.trajectories.files.schema_versions import SCHEMA_VERSION, check_version, whole_episode
from ares_exp.trajectories.files.step_encoding import StepDecoder, StepEncoder
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, total_reward

PARTIAL = ".partial"
STEPS = '"steps": ['


class BegunEpisode(Protocol):
    """What is known of an episode when it begins: a collector's handle, or a whole trajectory."""

    @property
    def episode_id(self) -> str:
        """As in `EpisodeTrajectory`, like the others."""

    @property
    def task_name(self) -> str: ...  # noqa: D102

    @property
    def start_time(self) -> float: ...  # noqa: D102

    @property
    def metadata(self) -> Mapping[str, Any]: ...  # noqa: D102


def opening_fields(begun: BegunEpisode) -> dict[str, Any]:
    """Returns the fields of an episode that are written when it begins."""
    return {
        "schema_version": SCHEMA_VERSION,
        "episode_id": begun.episode_id,
        "task_name": begun.task_name,
        "start_time": begun.start_time,
        "metadata": begun.metadata,
    }


def closing_fields(trajectory: EpisodeTrajectory) -> dict[str, Any]:
    """Returns the fields that are written when it ends; `unfinished_step` and `rewards` only if there are any."""
    unfinished = trajectory.unfinished_step
    more: dict[str, Any] = {} if unfinished is None else {"unfinished_step": unfinished.to_dict()}
    more |= {"rewards": trajectory.rewards} if trajectory.rewards else {}
    return {
        "end_time": trajectory.end_time,
        "total_reward": trajectory.total_reward,
        "num_steps": trajectory.num_steps,
        "truncated": trajectory.truncated,
        "outcome": trajectory.outcome,
        "error": trajectory.error.to_dict() if trajectory.error is not None else None,
        **more,
    }


def opening_line(begun: BegunEpisode) -> str:
    """Returns the first line of an episode's file."""
    return f"{dump_json(opening_fields(begun))[:-1]}, {STEPS}\n"


def step_line(encoded: Mapping[str, Any], *, first: bool) -> str:
    """Returns the line of an encoded step."""
    return f"{'' if first else ','}{dump_json(encoded)}\n"


def closing_line(trajectory: EpisodeTrajectory) -> str:
    """Returns the last line: how the episode ended."""
    return f"], {dump_json(closing_fields(trajectory))[1:]}\n"


def dump_episode(trajectory: EpisodeTrajectory) -> Iterator[str]:
    """Yields the lines of the file of a whole episode."""
    encoder = StepEncoder()
    yield opening_line(trajectory)
    for number, record in enumerate(trajectory.steps):
        yield step_line(encoder.encode(record)[1], first=number == 0)
    yield closing_line(trajectory)


def load_episode(path: Path) -> EpisodeTrajectory:
    """Reads the file of one episode, whole; see `EpisodeTrajectory.load`."""
    reader = _EpisodeReader()
    try:
        return reader.read(path)
    except (OSError, *BROKEN) as error:
        raise _format_error(path, reader, error) from error


def load_header(path: Path) -> EpisodeTrajectory | None:
    """Reads the fields of an episode but its steps, from both ends of its file.

    Returns:
        The episode without its steps; `None` where the file is not in this layout, so that only reading
        it whole tells.

    Raises:
        TrajectoryFormatError: It cannot be read, or its first or its last line is broken or missing.
    """
    reader = _EpisodeReader()
    try:
        reader.line, last = first_and_last_line(path)
        if (head := _head(reader.line.text)) is None:
            return None
        reader.head, reader.line = head, last
        if not last.text.startswith("]"):
            raise ValueError("the end is missing")
        return validated(EpisodeTrajectory, {**head, **_end(last.text), "steps": ()})
    except (OSError, *BROKEN) as error:
        raise _format_error(path, reader, error) from error


def salvage_episode(path: Path) -> tuple[EpisodeTrajectory, str | None]:
    """Reads an episode's file up to its end, or to the first broken step.

    Returns:
        The episode, and what was wrong with its file, `None` if nothing was. The outcome of an episode whose end is
        missing is `lost`, unless its LAST step is there.

    Raises:
        TrajectoryFormatError: Not even the first line can be read.
    """
    reader = _EpisodeReader()
    try:
        return reader.read(path), None
    except (OSError, *BROKEN) as error:
        broken = _format_error(path, reader, error)
        if reader.head is None:
            raise broken from error
    return end_unfinished(reader.head, reader.steps), str(broken)


def end_unfinished(head: Mapping[str, Any], steps: list[StepRecord]) -> EpisodeTrajectory:
    """Makes an episode of its beginning. Raises `TrajectoryFormatError` where `head` is not sound."""
    last = steps[-1] if steps else None
    outcome = Outcome.LOST
    error: ErrorInfo | None = ErrorInfo("lost", f"the end is missing; {len(steps)} steps are left")
    if last is not None and last.step_type == "LAST":
        outcome, error, _ = ending(last)
    try:
        return whole_episode(
            {
                **head,
                "end_time": last.timestamp if last is not None else head["start_time"],
                "total_reward": total_reward(steps),
                "num_steps": len(steps),
                "truncated": outcome is Outcome.TRUNCATED,
                "outcome": outcome,
                "error": error,
            },
            steps,
        )
    except BROKEN as broken:
        raise TrajectoryFormatError(f"Expected the beginning of a trajectory: {what_broke(broken)}") from broken


class _EpisodeReader:
    """Reads one file; what was read when something broke stays readable."""

    def __init__(self) -> None:
        self.head: Mapping[str, Any] | None = None
        self.steps: list[StepRecord] = []
        self.line = Line(0, 1, "")

    def read(self, path: Path) -> EpisodeTrajectory:
        with read_lines(path) as lines:
            self.line = next(lines, self.line)
            if (head := _head(self.line.text)) is None:
                return _from_object(json.loads(self.line.text + read_rest(lines)))
            self.head = head
            return self._read_body(lines, head)

    def _read_body(self, lines: Iterator[Line], head: Mapping[str, Any]) -> EpisodeTrajectory:
        decoder = StepDecoder()
        for self.line in lines:
            text = self.line.text
            if not text.startswith("]"):
                self.steps.append(decoder.decode(json.loads(text.removeprefix(","))))
                continue
            episode = whole_episode({**head, **_end(text)}, self.steps)
            if (after := next(lines, None)) is not None:
                raise ValueError(f"expected nothing after the end, got {after.text!r:.80}")
            return episode
        raise ValueError(f"the end is missing: the file stops after {len(self.steps)} steps")


def _head(first_line: str) -> dict[str, Any] | None:
    """Reads the first line of a file in our layout; `None` for another layout."""
    text = first_line.rstrip()
    if not text.endswith(STEPS):
        return None
    head: dict[str, Any] = json.loads(f"{text}]}}")
    check_version(head.get("schema_version"))
    return head


def _end(last_line: str) -> dict[str, Any]:
    end: dict[str, Any] = json.loads("{" + last_line.removeprefix("],"))
    return end


def _from_object(data: Any) -> EpisodeTrajectory:
    if not isinstance(data, dict):
        raise TypeError(f"expected a JSON object, got {type(data).__name__}")
    return EpisodeTrajectory.from_dict(data)


def _format_error(path: Path, reader: _EpisodeReader, error: BaseException) -> TrajectoryFormatError:
    if isinstance(error, OSError):
        return TrajectoryFormatError(f"{path}: {error.strerror or error}.")
    where = "" if isinstance(error, TextTooLongError) else f" {reader.line.place}"
    remedy = "" if reader.head is None else f" `ares-exp recover {path}` keeps what is good."
    return TrajectoryFormatError(f"{path}{where}: {what_broke(error)}.{remedy}")
