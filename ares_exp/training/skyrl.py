"""Training sequences as SkyRL's generators return them.

```
class OurEpisodes(GeneratorInterface):                 # skyrl.train.generators.base
    async def generate(self, input_batch):
        reports = [sequences_of(episode) for episode in await run(input_batch)]
        return generator_output(reports, trajectory_ids=input_batch["trajectory_ids"])
```

The keys are those of SkyRL 0.3's `GeneratorOutput`; nothing of SkyRL is imported here. Where an episode has several
rows, they are the steps of a trajectory, for `generator.step_wise_trajectories=true`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ares_exp.errors import UntrainableError
from ares_exp.training.sequences import SequenceReport


def generator_output(
    reports: Sequence[SequenceReport], *, trajectory_ids: Sequence[Any] | None = None, step_wise: bool | None = None
) -> dict[str, Any]:
    """Returns what a generator answers to a batch.

    Args:
        reports: Of the episodes, in the order of the batch.
        trajectory_ids: Those of the batch, one for each episode; needed for step-wise training.
        step_wise: Whether the trainer is set to it; by default, whether an episode has several rows.

    Raises:
        UntrainableError: An episode has no reward; or one has several rows, and the training is not step-wise.
        ValueError: There are not as many trajectory ids as episodes.
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
