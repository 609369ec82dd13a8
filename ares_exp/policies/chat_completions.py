"""The chat-completions policy: any OpenAI-compatible endpoint, with retries, bounds, token usage and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from ares_exp.llms.openai_chat import MaxTokensField, request_to_body, response_from_body
from ares_exp.llms.openai_chat_stream import StreamedCompletion
from ares_exp.llms.reasoning import ReasoningField, reasoning_to_message
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, ThinkingData
from ares_exp.llms.wire import Report
from ares_exp.policies.endpoint import EndpointWire
from ares_exp.policies.endpoint_policy import (
    Count,
    EndpointPolicy,
    ExtraBody,
    ModelName,
    ModelPrice,
    OnRefusal,
    Seconds,
    StopSequences,
    Temperature,
    TopP,
    Url,
    VariableName,
)
from ares_exp.policies.policy import EpisodeSpec


class ChatCompletionsPolicy(EndpointPolicy):
    """Answers requests by `POST {base_url}/chat/completions`.

    Attributes:
        seed: Sampling seed of every request; `"episode"` for the episode's own; `None` sends none.
        max_tokens_field: What the endpoint calls the bound on generated tokens; `max_tokens` for engines that know
            only the older name.
        send_reasoning: Whether the model's reasoning is sent back in the messages that repeat its answers: the name
            of the field that the endpoint reads, `reasoning_content` (also `true`), `reasoning` or
            `reasoning_details`. Other endpoints ignore such a field, refuse it, or charge for it.
    """

    wire = EndpointWire(
        "chat_completions",
        "chat/completions",
        "choices",
        StreamedCompletion,
        {"stream": True, "stream_options": {"include_usage": True}},
    )

    @pydantic.validate_call
    def __init__(
        self,
        *,
        model: ModelName | None,
        base_url: Url = "https://api.openai.com/v1",
        api_key_env: VariableName | None = "OPENAI_API_KEY",
        temperature: Temperature | None = None,
        top_p: TopP | None = None,
        max_output_tokens: Count | None = None,
        stop_sequences: StopSequences | None = None,
        seed: int | Literal["episode"] | None = None,
        stream: bool = False,
        stream_idle_sec: Seconds = 120.0,
        timeout_sec: Seconds = 600.0,
        max_retries: Annotated[int, Field(ge=0)] = 5,
        retry_base_sec: Seconds = 1.0,
        max_retry_wait_sec: Seconds = 60.0,
        max_concurrency: Count = 64,
        max_concurrency_per_episode: Count = 16,
        max_answer_bytes: Count = 64 * 2**20,
        preflight_timeout_sec: Seconds = 10.0,
        prices: Mapping[str, ModelPrice] | None = None,
        extra_body: ExtraBody | None = None,
        max_tokens_field: MaxTokensField = "max_completion_tokens",
        on_refusal: OnRefusal = "answer",
        send_reasoning: Literal[False, True, ReasoningField] = False,
        strict: bool = True,
    ) -> None:
        """Checks the settings, those of `EndpointPolicy` and its own."""
        super().__init__(
            model=model,
            base_url=base_url,
            api_key_env=api_key_env,
            temperature=temperature,
            top_p=top_p,
            max_output_tokens=max_output_tokens,
            stop_sequences=stop_sequences,
            stream=stream,
            stream_idle_sec=stream_idle_sec,
            timeout_sec=timeout_sec,
            max_retries=max_retries,
            retry_base_sec=retry_base_sec,
            max_retry_wait_sec=max_retry_wait_sec,
            max_concurrency=max_concurrency,
            max_concurrency_per_episode=max_concurrency_per_episode,
            max_answer_bytes=max_answer_bytes,
            preflight_timeout_sec=preflight_timeout_sec,
            prices=prices,
            extra_body=extra_body,
            on_refusal=on_refusal,
            strict=strict,
        )
        self._seed = seed
        self._max_tokens_field: MaxTokensField = max_tokens_field
        self._reasoning_field: ReasoningField | None = (
            "reasoning_content" if send_reasoning is True else send_reasoning or None
        )

    @property
    def _sends_reasoning(self) -> bool:
        return self._reasoning_field is not None

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """As `EndpointPolicy.__call__`, and warns if reasoning is to be sent back."""
        if self._reasoning_field is not None:
            self._warn_once("policy.send_reasoning has no effect outside of episodes: use for_episode().")
        return await super().__call__(request)

    def body_of(self, request: LLMRequest, model: str, episode: EpisodeSpec | None) -> dict[str, Any]:
        """As `EndpointPolicy.body_of`. A seed of an episode is its low 31 bits."""
        body = request_to_body(
            request,
            model=model,
            max_tokens_field=self._max_tokens_field,
            strict=self._strict,
            report=self._warn_once,
        )
        seed = self._seed
        if seed == "episode":
            seed = None if episode is None else episode.seed % 2**31
        return body if seed is None else {**body, "seed": seed}

    def read_answer(self, body: Any, report: Report) -> LLMResponse:
        """As `EndpointPolicy.read_answer`."""
        return response_from_body(body, strict=False, report=report)

    def with_reasoning(self, message: Mapping[str, Any], pieces: Sequence[ThinkingData]) -> Mapping[str, Any]:
        """As `EndpointPolicy.with_reasoning`."""
        return {**message, **reasoning_to_message(pieces, self._reasoning_field)}
