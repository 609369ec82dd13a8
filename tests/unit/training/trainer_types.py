"""Fields and types of the outputs that verl 0.9.1, SkyRL 0.4.0 and slime 0.3.1 read, and their checks."""

from dataclasses import dataclass, field
from enum import Enum
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


@dataclass
class Sample:
    """Of `slime.utils.types`."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: list[list[int]] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: Any = None
    prefix_cache_info: Any = None


def check_generator_output(output: GeneratorOutput, prompts: int) -> None:
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
