"""The schema version of trajectory files (JSON and JSON Lines), and the reading of an episode from its JSON form.

See `step_encoding` for the steps and `episode_file` for the file. The full form that `EpisodeTrajectory.to_dict`
returns has no `schema_version`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ares_exp.errors import TrajectoryFormatError, TrajectoryVersionError
from ares_exp.records.validation import validated
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.files.step_encoding import StepDecoder
from ares_exp.trajectories.records import EpisodeTrajectory

SCHEMA_VERSION = 3


def episode_from_dict(data: Mapping[str, Any]) -> EpisodeTrajectory:
    """Makes a trajectory from its JSON form.

    Raises:
        TrajectoryFormatError: A field is missing or has the wrong form.
    """
    try:
        steps = data["steps"]
        if (version := data.get("schema_version")) is not None:
            check_version(version)
            steps = map(StepDecoder().decode, steps)
        return whole_episode(data, steps)
    except BROKEN as error:
        raise TrajectoryFormatError(f"Expected a trajectory: {what_broke(error)}") from error


def whole_episode(data: Mapping[str, Any], steps: Iterable[Any]) -> EpisodeTrajectory:
    """Makes an episode of its fields and its steps.

    Args:
        data: The fields in their JSON form.
        steps: The steps: records, or their JSON form.

    Raises:
        ValueError: A field is missing or invalid, or the number of steps is not `num_steps`.
    """
    episode = validated(EpisodeTrajectory, {**data, "steps": tuple(steps)})
    if episode.num_steps != len(episode.steps):
        raise ValueError(f"expected {episode.num_steps} steps, got {len(episode.steps)}")
    return episode


def check_version(version: Any) -> None:
    """Checks the schema version of a file. Raises `TrajectoryVersionError` if it is not the expected one."""
    if type(version) is not int or version != SCHEMA_VERSION:
        is_atif = isinstance(version, str) and version.startswith("ATIF")
        fix = "use the run that it was exported from" if is_atif else "use the version of ares_exp that wrote the file"
        raise TrajectoryVersionError(f"expected schema_version {SCHEMA_VERSION}, got {version!r:.80}: {fix}")
