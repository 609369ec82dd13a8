"""The `info` of Gymnasium's `reset` and `step`: its keys, and what fills them."""

from __future__ import annotations

from typing import Any, TypedDict

from ares_exp.environment import EnvironmentBase
from ares_exp.records.results import EpisodeUsage
from ares_exp.trajectories.records import ending


class UsageInfo(TypedDict):
    """Tokens and cost of the actions since `reset`.

    Attributes:
        prompt_tokens, generated_tokens: As the engine counted them; 0 for an action that says nothing of it.
        cost: US dollars.
    """

    prompt_tokens: int
    generated_tokens: int
    cost: float


class EpisodeInfo(TypedDict):
    """`info` after `reset` and after `step`: always all of these keys, so that vector environments can stack them.

    Attributes:
        time_step: The environment's own `TimeStep`.
        task: Name of the task; `None` where the environment has no tasks.
        step: Number of actions since `reset`: 0 after `reset`.
        usage: Tokens and cost of these actions.
        outcome: After the last step `"completed"` or `"truncated"` (`"errored"` for a reward that is not finite), as in
            the rows of a run; `None` before.
        limit: The limit that truncated the episode (`"steps"`, `"time"`, `"tokens"`, `"cost"`, …), `"unknown"` where
            the environment does not say; `None` for none.
        rewards: After the last step everything that the verifier scored, by key; empty before, and without a verifier.
    """

    time_step: Any
    task: str | None
    step: int
    usage: UsageInfo
    outcome: str | None
    limit: str | None
    rewards: dict[str, float]


def info_of(time_step: Any, env: EnvironmentBase, task: str | None, usage: EpisodeUsage) -> EpisodeInfo:
    """Makes the `info` of the time step that `env` has just returned, after actions that came to `usage`."""
    info: EpisodeInfo = {
        "time_step": time_step,
        "task": task,
        "step": usage.step_count,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "generated_tokens": usage.generated_tokens,
            "cost": usage.cost,
        },
        "outcome": None,
        "limit": None,
        "rewards": {},
    }
    if time_step.step_type == "LAST":
        report = env.report()
        ended = ending(time_step, limit=report.truncated_by, note=report.limit_note)
        info["outcome"] = ended.outcome.value
        info["limit"] = ended.error.limit if ended.error is not None else None
        info["rewards"] = {key: float(value) for key, value in report.rewards.items()}
    return info
