"""Training sequences as SkyRL's generators return them.

```
class OurEpisodes(GeneratorInterface):                 # skyrl.train.generators.base
    async def generate(self, input_batch):
        reports = [sequences_of(episode) for episode in await run(input_batch)]
        return generator_output(reports, trajectory_ids=input_batch["trajectory_ids"])
```

The keys match `GeneratorOutput` of SkyRL 0.3. This module does not import SkyRL. If an episode has several rows, they
become the steps of a trajectory, for `generator.step_wise_trajectories=true`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ares_exp.errors import UntrainableError
from ares_exp.training.sequences import SequenceReport


def generator_output(
    reports: Sequence[SequenceReport], *, trajectory_ids: Sequence[Any] | None = None, step_wise: bool | None = None
) -> dict[str, Any]:
    """Returns the output of a SkyRL generator for a batch.

    Args:
        reports: Reports of the episodes, in the order of the batch.
        trajectory_ids: Trajectory ids of the batch, one per episode. Required for step-wise training.
        step_wise: Whether the trainer is configured for step-wise training. Defaults to `True` if an episode has
            several rows.

    Raises:
        UntrainableError: An episode has no reward, or has several rows although the training is not step-wise.
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
    rows = [(number, row) for number, report in enumerate(reports) for row in report.rows]
    output: dict[str, Any] = {
        "prompt_token_ids": [list(row.prompt_ids) for _, row in rows],
        "response_ids": [list(row.response_ids) for _, row in rows],
        "rewards": [row.known_reward() for _, row in rows],
        "loss_masks": [list(row.response_mask) for _, row in rows],
        "stop_reasons": [row.finish_reason or "stop" for _, row in rows],
        "rollout_metrics": None,
        "rollout_logprobs": [list(row.response_logprobs) for _, row in rows],
        "trajectory_ids": [trajectory_ids[number] for number, _ in rows] if trajectory_ids is not None else None,
        "trajectory_generation_times": None,
        "rollout_expert_indices": None,
        "is_last_step": [row is reports[number].rows[-1] for number, row in rows] if step_wise else None,
        "env_metrics": [dict(row.rewards) for _, row in rows],
        "pixel_values": None,
        "image_grid_thw": None,
    }
    return output
