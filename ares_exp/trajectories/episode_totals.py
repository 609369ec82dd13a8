"""Totals of an episode: tokens, cost, seconds, commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ares_exp.trajectories.checks import is_number
from ares_exp.trajectories.records import EpisodeTrajectory


@dataclass(frozen=True, slots=True)
class EpisodeTotals:
    """Sums over the steps of an episode; `None` where no step tells.

    Attributes:
        prompt_tokens, generated_tokens: As the engine counted them.
        reasoning_tokens: Those of the generated ones that are reasoning, where the engine said so.
        cost: US dollars.
        duration_sec: Wall seconds from its start to its end.
        policy_sec, environment_sec, container_sec: As in `StepRecord`.
        commands: How many commands the agent ran.
    """

    prompt_tokens: int | None
    generated_tokens: int | None
    reasoning_tokens: int | None
    cost: float | None
    duration_sec: float
    policy_sec: float | None
    environment_sec: float | None
    container_sec: float | None
    commands: int

    @classmethod
    def of(cls, trajectory: EpisodeTrajectory) -> EpisodeTotals:
        """Adds up the steps of a trajectory."""
        steps = trajectory.steps
        actions = [step.action for step in steps if step.action is not None]
        usages = [usage for action in actions if isinstance(usage := action.get("usage"), Mapping)]
        return cls(
            prompt_tokens=_sum(usage.get("prompt_tokens") for usage in usages),
            generated_tokens=_sum(usage.get("generated_tokens") for usage in usages),
            reasoning_tokens=_sum(usage.get("reasoning_tokens") for usage in usages),
            cost=_sum(action.get("cost") for action in actions),
            duration_sec=trajectory.end_time - trajectory.start_time,
            policy_sec=_sum(step.policy_sec for step in steps),
            environment_sec=_sum(step.environment_sec for step in steps),
            container_sec=_sum(step.container_sec for step in steps),
            commands=sum(len(step.commands) for step in steps),
        )


def _sum(values: Any) -> Any:
    """Returns the sum of those that are numbers: a stranger's episode may have anything there."""
    numbers = [value for value in values if is_number(value)]
    return sum(numbers) if numbers else None
