"""Fields and types of the outputs that verl 0.9.1 and SkyRL 0.4.0 read, and their checks."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from typing_extensions import TypedDict


class AgentLoopMetrics(BaseModel):
    """Of `verl.experimental.agent_loop.agent_loop`."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel):
    """Of `verl.experimental.agent_loop.agent_loop`."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = {}
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: list[dict[str, Any]] | None = None


class GeneratorOutput(TypedDict):
    """Of `skyrl.train.generators.base`."""

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str] | None
    rollout_metrics: dict[str, Any] | None
    rollout_logprobs: list[list[float]] | None
    trajectory_ids: list[Any] | None
    trajectory_generation_times: list[float] | None
    trajectory_time_splits: dict[str, list[float]] | None
    rollout_expert_indices: list[list[list[list[int]]]] | None
    rollout_sample_support: list[Any] | None
    is_last_step: list[bool] | None
    env_metrics: list[dict[str, Any]] | None
    pixel_values: list[Any] | None
    image_grid_thw: list[Any] | None


def check_generator_output(output: GeneratorOutput, prompts: int) -> None:
    """Asserts what `validate_generator_output` of SkyRL does."""
    responses = len(output["response_ids"])
    step_wise = output["is_last_step"] is not None
    assert responses == len(output["prompt_token_ids"])
    assert step_wise or responses == prompts
    per_row: list[list[Any] | None] = [
        output["loss_masks"], output["rewards"], output["rollout_logprobs"], output["stop_reasons"],
        output["trajectory_ids"], output["is_last_step"], output["env_metrics"],
    ]  # fmt: skip
    assert all(values is None or len(values) == responses for values in per_row)
    for row, ids in enumerate(output["response_ids"]):
        assert len(ids) == len(output["loss_masks"][row]) == len((output["rollout_logprobs"] or [])[row])
    if output["is_last_step"] is not None:
        assert output["trajectory_ids"] is not None
        assert output["is_last_step"][-1] is True
        assert sum(output["is_last_step"]) == prompts
        ends = [
            at + 1 == responses or output["trajectory_ids"][at] != output["trajectory_ids"][at + 1]
            for at in range(responses)
        ]
        assert output["is_last_step"] == ends
