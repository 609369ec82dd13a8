"""Training sequences as SkyRL's generators return them.

```
class OurEpisodes(GeneratorInterface):                 # skyrl.train.generators.base
    async def generate(self, input_batch):
        reports = [sequences_of(episode) for episode in await run(input_batch)]
        return generator_output(reports, trajectory_ids=input_batch["trajectory_ids"])
```

The keys match `GeneratorOutput` of SkyRL 0.4. This module does not import SkyRL. If an episode has several rows, they
become the steps of a trajectory, for `generator.step_wise_trajectories=true`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ares_exp.errors import UntrainableError
from ares_exp.training.sequences import NO_ROW, Lost, SequenceReport


def generator_output(
    reports: Sequence[SequenceReport],
    *,
    trajectory_ids: Sequence[Any] | None = None,
    step_wise: bool | None = None,
    lost: Lost = "group",
) -> dict[str, Any]:
    """Returns the output of a SkyRL generator for a batch.

    Args:
        reports: Reports of the episodes, in the order of the batch.
        trajectory_ids: Trajectory ids of the batch, one per episode. Required for step-wise training.
        step_wise: Whether the trainer is configured for step-wise training. Defaults to `True` if an episode has
            several rows.
        lost: The rows whose masks are zeros because an episode has no reward. `group`: the rows of all episodes with
            the same `instance_id`, as SkyRL's own integration of Harbor does. `mask`: only the rows of this episode,
            whose reward of 0.0 still counts in the mean of its group. Without trajectory ids, both mean `mask`.

    Raises:
        UntrainableError: An episode has several rows although the training is not step-wise.
        ValueError: The numbers of trajectory ids and episodes differ.
    """
    several = next((report.rows[0] for report in reports if len(report.rows) > 1), None)
    step_wise = several is not None if step_wise is None else step_wise
    if several is not None and not step_wise:
        raise UntrainableError(
            f"Expected one row of episode {several.episode_id} ({several.task}), got more: its history was rewritten. "
            "Train step-wise (`generator.step_wise_trajectories=true`), or keep the agent from rewriting it."
        )
    if (step_wise or trajectory_ids is not None) and len(trajectory_ids or ()) != len(reports):
        raise ValueError(f"Expected {len(reports)} trajectory ids, got {len(trajectory_ids or ())}")
    groups = [_group(trajectory_ids[at]) if trajectory_ids and lost == "group" else at for at in range(len(reports))]
    lost_groups = {group for group, report in zip(groups, reports, strict=True) if report.is_lost}
    rows = [
        (number, row.untrained() if groups[number] in lost_groups else row, row is (report.rows or (NO_ROW,))[-1])
        for number, report in enumerate(reports)
        for row in report.rows or (NO_ROW,)
    ]
    output: dict[str, Any] = {
        "prompt_token_ids": [list(row.prompt_ids) for _, row, _ in rows],
        "response_ids": [list(row.response_ids) for _, row, _ in rows],
        "rewards": [row.reward or 0.0 for _, row, _ in rows],
        "loss_masks": [list(row.response_mask) for _, row, _ in rows],
        "stop_reasons": [row.finish_reason or "stop" for _, row, _ in rows],
        "rollout_metrics": None,
        "rollout_logprobs": [list(row.response_logprobs) for _, row, _ in rows],
        "trajectory_ids": [trajectory_ids[number] for number, _, _ in rows] if trajectory_ids is not None else None,
        "trajectory_generation_times": None,
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        "rollout_sample_support": None,
        "is_last_step": [is_last for _, _, is_last in rows] if step_wise else None,
        "env_metrics": [dict(row.rewards) for _, row, _ in rows],
        "pixel_values": None,
        "image_grid_thw": None,
    }
    return output


def _group(trajectory_id: Any) -> Any:
    return getattr(trajectory_id, "instance_id", trajectory_id)
