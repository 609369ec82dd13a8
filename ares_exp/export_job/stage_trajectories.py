"""One trajectory becomes several: Harbor has one for each step of a multi-step task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ares_exp.results import StageResult
from ares_exp.trajectories.records import EpisodeTrajectory


def of_stages(trajectory: EpisodeTrajectory, stages: Sequence[StageResult]) -> list[EpisodeTrajectory]:
    """The part of each stage; and one more of what came after the last stage that ended, if something did.

    The step that ended one stage began the next one: its action goes to the first, what it showed to the other.
    """
    parts: list[EpisodeTrajectory] = []
    begin = 0
    for stage in stages:
        parts.append(replace(_between(trajectory, begin, begin + stage.num_steps), total_reward=stage.reward))
        begin += stage.num_steps
    if len(trajectory.steps) > begin and trajectory.steps[begin].observation is not None:
        parts.append(_between(trajectory, begin, len(trajectory.steps)))
    return parts


def _between(trajectory: EpisodeTrajectory, first: int, last: int) -> EpisodeTrajectory:
    """What was shown at step `first`, and all up to the action of step `last`."""
    records = list(trajectory.steps[first : last + 1])
    if records:
        records[0] = replace(records[0], step_type="FIRST", action=None, commands=())
        records[-1] = replace(records[-1], observation=None) if len(records) > last - first else records[-1]
    return replace(trajectory, steps=tuple(records), num_steps=len(records))
