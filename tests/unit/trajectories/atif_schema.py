"""The rules of ATIF 1.8 as Harbor has them (https://harborframework.com/docs/trajectory-format), for what we write."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
AGENT_ONLY = ("model_name", "reasoning_content", "tool_calls", "metrics")

Extra = dict[str, Any] | None


def validate_atif(document: Any) -> None:
    """Raises `ValidationError` for a document that breaks a rule."""
    Trajectory.model_validate(document)


def _iso_8601(text: str) -> str:
    datetime.fromisoformat(text)
    return text


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ImageSource(_Strict):
    media_type: Literal[IMAGE_TYPES]  # type: ignore[valid-type]
    path: str


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ImagePart(_Strict):
    type: Literal["image"]
    source: ImageSource


Content = str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class ToolCall(_Strict):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: Extra = None


class Result(_Strict):
    source_call_id: str | None = None
    content: Content | None = None
    extra: Extra = None


class Observation(_Strict):
    results: list[Result]


class Metrics(_Strict):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: Extra = None


class Step(_Strict):
    step_id: Annotated[int, Field(ge=1)]
    source: Literal["system", "user", "agent"]
    message: Content
    timestamp: Annotated[str, AfterValidator(_iso_8601)] | None = None
    observation: Observation | None = None
    is_copied_context: bool | None = None
    llm_call_count: Annotated[int, Field(ge=0)] | None = None
    extra: Extra = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    metrics: Metrics | None = None

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        if self.source != "agent":
            for name in AGENT_ONLY:
                if getattr(self, name) is not None:
                    raise ValueError(f"expected `{name}` on agent steps only, got it on a {self.source} step")
        if self.llm_call_count == 0 and (self.metrics is not None or self.reasoning_content is not None):
            raise ValueError("expected neither `metrics` nor `reasoning_content` where `llm_call_count` is 0")
        calls = {call.tool_call_id for call in self.tool_calls or ()}
        for result in self.observation.results if self.observation else ():
            if result.source_call_id is not None and result.source_call_id not in calls:
                raise ValueError(
                    f"expected a tool call of this step, got `source_call_id` {result.source_call_id!r:.80}"
                )
        return self


class Agent(_Strict):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None
    extra: Extra = None


class FinalMetrics(_Strict):
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: Annotated[int, Field(ge=0)] | None = None
    extra: Extra = None


class Trajectory(_Strict):
    schema_version: Literal["ATIF-v1.8"]
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: Agent
    steps: Annotated[list[Step], Field(min_length=1)]
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    extra: Extra = None

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        for number, step in enumerate(self.steps, 1):
            if step.step_id != number:
                raise ValueError(f"expected step ids 1, 2, 3, … in order, got {step.step_id} in place of {number}")
        return self
