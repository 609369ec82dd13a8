"""A SkyRL generator that runs episodes in the rollout service, and training sequences in SkyRL's format.

```
class Experiment(BasePPOExp):                          # skyrl.train.entrypoints.main_base
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        model = resolve_policy_model_name(cfg)
        return EpisodeGenerator("http://127.0.0.1:8300", inference_engine_client, model=model)
```

The keys match `GeneratorOutput` of SkyRL 0.4. This module does not import SkyRL. If an episode has several rows, set
`generator.step_wise_trajectories=true`, so that each row becomes a step of a trajectory.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ares_exp.errors import UntrainableError
from ares_exp.training.client import Client, sampling_of
from ares_exp.training.sequences import NO_ROW, Lost, SequenceReport


class EpisodeGenerator:
    """A SkyRL generator (`GeneratorInterface`). The data set needs a column `task` with the name of a task."""

    def __init__(
        self,
        url: str,
        engine: Any,
        *,
        model: str,
        key_env: str | None = None,
        lost: Lost = "group",
        step_wise: bool | None = None,
        **submission: Any,
    ) -> None:
        """Stores the arguments.

        Args:
            url: URL of the rollout service.
            engine: Client of SkyRL's inference engine.
            model: Name of the model in requests to the engine.
            key_env: Environment variable with the service's key.
            lost: Treatment of episodes without a reward, as for `generator_output`.
            step_wise: Whether the trainer is configured for step-wise training, as for `generator_output`.
            submission: Other fields of the submissions, such as `limits`. Values in `policy` replace defaults.
        """
        self._url, self._engine, self._key_env = url, engine, key_env
        self._lost, self._step_wise = lost, step_wise
        policy = {"base_url": f"{engine.get_endpoint_url()}/v1", "headers": {"X-Session-ID": "{rollout_id}"}}
        self._policy = {**policy, "model": model, **submission.pop("policy", {})}
        self._submission = submission

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one episode per prompt of the batch. Returns the training rows in the format of `GeneratorOutput`."""
        policy = {"sampling": sampling_of(input_batch["sampling_params"] or {}), **self._policy}
        async with Client(self._url, key_env=self._key_env) as client, asyncio.TaskGroup() as group:
            tasks = [extras["task"] for extras in input_batch["env_extras"]]
            running = [group.create_task(self._report(client, task, policy)) for task in tasks]
        reports = [task.result() for task in running]
        ids = input_batch["trajectory_ids"]
        return generator_output(reports, trajectory_ids=ids, step_wise=self._step_wise, lost=self._lost)

    async def _report(self, client: Client, task: str, policy: Mapping[str, Any]) -> SequenceReport:
        rollout_id = uuid.uuid4().hex
        try:
            [episode] = await client.run([task], rollout_ids=[rollout_id], policy=policy, **self._submission)
            return episode.report
        finally:
            await self._engine.finish_session(rollout_id)


def generator_output(
    reports: Sequence[SequenceReport],
    *,
    trajectory_ids: Sequence[Any] | None = None,
    step_wise: bool | None = None,
    lost: Lost = "group",
) -> dict[str, Any]:
    """Converts the rows of a batch of episodes to the output of a SkyRL generator.

    Args:
        reports: Reports of the episodes, in the order of the batch.
        trajectory_ids: Trajectory ids of the batch, one per episode. Required for step-wise training.
        step_wise: Whether the trainer is configured for step-wise training. Defaults to `True` if an episode has
            several rows.
        lost: Treatment of an episode without a reward. `group` masks the rows of all episodes with the same
            `instance_id`, as SkyRL's own integration of Harbor does. `mask` masks only the rows of this episode, but
            its reward of 0.0 counts in the mean of the group. Without trajectory ids, `group` works like `mask`.

    Raises:
        UntrainableError: An episode has several rows although the training is not step-wise.
        ValueError: The numbers of trajectory ids and episodes differ.
    """
    several = next((report.rows[0] for report in reports if len(report.rows) > 1), None)
    step_wise = several is not None if step_wise is None else step_wise
    if several is not None and not step_wise:
        raise UntrainableError(
            f"Episode {several.episode_id} ({several.task}) has several training rows, because the agent rewrote its "
            "history. Train step-wise (`generator.step_wise_trajectories=true`), or prevent the agent from rewriting "
            "its history."
        )
    if (step_wise or trajectory_ids is not None) and len(trajectory_ids or ()) != len(reports):
        raise ValueError(f"Expected {len(reports)} trajectory ids, got {len(trajectory_ids or ())}")
    groups: Sequence[Any] = range(len(reports))
    if trajectory_ids and lost == "group":
        groups = [getattr(one, "instance_id", one) for one in trajectory_ids]
    lost_groups = {group for group, report in zip(groups, reports, strict=True) if report.is_lost}
    rows = [
        (number, row.untrained() if groups[number] in lost_groups else row, row is (report.rows or (NO_ROW,))[-1])
        for number, report in enumerate(reports)
        for row in report.rows or (NO_ROW,)
    ]
    unused = ["rollout_metrics", "trajectory_generation_times", "trajectory_time_splits", "rollout_expert_indices"]
    unused += ["rollout_sample_support", "pixel_values", "image_grid_thw"]
    return {
        **dict.fromkeys(unused),
        "prompt_token_ids": [list(row.prompt_ids) for _, row, _ in rows],
        "response_ids": [list(row.response_ids) for _, row, _ in rows],
        "rewards": [row.reward or 0.0 for _, row, _ in rows],
        "loss_masks": [list(row.response_mask) for _, row, _ in rows],
        "stop_reasons": [row.finish_reason or "stop" for _, row, _ in rows],
        "rollout_logprobs": [list(row.response_logprobs) for _, row, _ in rows],
        "trajectory_ids": [trajectory_ids[number] for number, _, _ in rows] if trajectory_ids is not None else None,
        "is_last_step": [is_last for _, _, is_last in rows] if step_wise else None,
        "env_metrics": [dict(row.rewards) for _, row, _ in rows],
    }
