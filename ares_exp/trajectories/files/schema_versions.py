"""Schema versions of trajectory files, and the reading of the steps of each.

- 1: every message once in the top-level `messages`; an observation has `message_ranges`, a list of `[start, stop)`
  pairs into it, in place of `messages`.
- 2: see `step_encoding` for the steps and `episode_file` for the file.
- 3: as 2; a piece of an action may be reasoning (`thinking`, maybe `signature` and `redacted`), and its `usage` may
  have `cached_tokens`, `cache_write_tokens` and `reasoning_tokens`. An episode may have `rewards` at its end. A request
  may have an `origin`, with its `lane`, and a step may have `asides`.

The full form that `EpisodeTrajectory.to_dict` gives has no `schema_version`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ares_exp.errors import TrajectoryFormatError
from ares_exp.llms.request import freeze
from ares_exp.trajectories.checks import BROKEN, what_broke
from ares_exp.trajectories.files.checked_records import episode_fields, step_from_dict
from ares_exp.trajectories.files.step_encoding import StepDecoder
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

SCHEMA_VERSION = 3
STEP_ENCODED = (2, 3)
"""Versions whose steps are encoded as `step_encoding` says."""


def episode_from_dict(data: Mapping[str, Any]) -> EpisodeTrajectory:
    """Makes the trajectory that its JSON form says, of whatever version.

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


def check_step_encoded(version: Any) -> None:
    """Raises `ValueError` for a version whose steps are not encoded as `step_encoding` says, and for what is none."""
    if type(version) is not int or version not in STEP_ENCODED:
        raise ValueError(f"expected schema_version {SCHEMA_VERSION} or lower, got {version!r:.80}: update ares_exp")


def _read_steps(data: Mapping[str, Any]) -> Iterator[StepRecord]:
    """Yields the steps of a trajectory in its JSON form, of whatever version.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: A step is missing or broken, or the version is not known.
    """
    version = data.get("schema_version")
    steps = data["steps"]
    if not isinstance(steps, Sequence) or isinstance(steps, str):
        raise TypeError(f"expected `steps` to be a list, got {steps!r:.80}")
    if version is None:
        yield from map(step_from_dict, steps)
    elif version == 1:
        table = [freeze(message) for message in data.get("messages", ())]
        yield from (step_from_dict(_from_version_1(step, table)) for step in steps)
    elif version in STEP_ENCODED:
        yield from map(StepDecoder().decode, steps)
    elif isinstance(version, str) and version.startswith("ATIF"):
        raise ValueError(f"expected schema_version {SCHEMA_VERSION} or lower, got {version!r:.80}: name it ….atif.json")
    else:
        raise ValueError(f"expected schema_version {SCHEMA_VERSION} or lower, got {version!r:.80}: update ares_exp")


def _from_version_1(step: Mapping[str, Any], table: Sequence[Any]) -> Mapping[str, Any]:
    observation = step["observation"]
    if not isinstance(observation, Mapping) or "message_ranges" not in observation:
        return step
    rest = {name: value for name, value in observation.items() if name != "message_ranges"}
    messages: list[Any] = []
    for start, stop in observation["message_ranges"]:
        if not 0 <= start < stop <= len(table):
            raise ValueError(f"message range [{start}, {stop}) lies outside the {len(table)} messages")
        messages += table[start:stop]
    return {**step, "observation": {"messages": messages, **rest}}
