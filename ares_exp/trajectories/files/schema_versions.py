"""The schema version of trajectory files (JSON and JSON Lines), and the reading of an episode from its JSON form.

See `step_encoding` for the steps and `episode_file` for the file. The full form that `EpisodeTrajectory.to_dict`
returns has no `schema_version`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ares_exp.errors import TrajectoryFormatError, TrajectoryVersionError
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.files.checked_records import episode_fields, step_from_dict
from ares_exp.trajectories.files.step_encoding import StepDecoder
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

SCHEMA_VERSION = 3


def episode_from_dict(data: Mapping[str, Any]) -> EpisodeTrajectory:
    """Makes a trajectory from its JSON form.

    Raises:
        TrajectoryFormatError: A field is missing or has the wrong form.
    """
    try:
        steps, values = tuple(_read_steps(data)), episode_fields(data)
        if values["num_steps"] != len(steps):
            raise ValueError(f"expected {values['num_steps']} steps, got {len(steps)}")
        return EpisodeTrajectory(steps=steps, **values)
    except BROKEN as error:
        raise TrajectoryFormatError(f"Expected a trajectory: {what_broke(error)}") from error


def check_version(version: Any) -> None:
    """Checks the schema version of a file. Raises `TrajectoryVersionError` if it is not the expected one."""
    if type(version) is not int or version != SCHEMA_VERSION:
        is_atif = isinstance(version, str) and version.startswith("ATIF")
        fix = "use the run that it was exported from" if is_atif else "use the version of ares_exp that wrote the file"
        raise TrajectoryVersionError(f"expected schema_version {SCHEMA_VERSION}, got {version!r:.80}: {fix}")


def _read_steps(data: Mapping[str, Any]) -> Iterator[StepRecord]:
    """Yields the steps of a trajectory in its JSON form.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: A step is missing or broken, or the file has another version.
    """
    steps = data["steps"]
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        raise TypeError(f"expected `steps` to be a list, got {steps!r:.80}")
    if (version := data.get("schema_version")) is None:
        yield from map(step_from_dict, steps)
    else:
        check_version(version)
        yield from map(StepDecoder().decode, steps)
