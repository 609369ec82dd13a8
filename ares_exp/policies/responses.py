"""The Responses policy: endpoints of OpenAI's newer wire, with retries, bounds, token usage and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import pydantic
from pydantic import Field

from ares_exp.llms.openai_responses import request_to_body, response_from_body
from ares_exp.llms.openai_responses_stream import StreamedResponse
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
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


class ResponsesPolicy(EndpointPolicy):
    """Answers requests by `POST {base_url}/responses`. Nothing is stored at the endpoint: each request is whole.

    Reasoning comes back sealed, and is sent again with the messages that repeat the answers.

    Attributes:
        stop_sequences: Not part of this wire: refused, or with `strict=False` left out with a warning.
        reasoning_effort: How much the model is to think, as it calls it (`low`, `high`); `None` leaves it to the model.
    """

    wire = EndpointWire("responses", "responses", "output", StreamedResponse)

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
        reasoning_effort: Annotated[str, Field(min_length=1)] | None = None,
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
        on_refusal: OnRefusal = "answer",
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
        self._effort = reasoning_effort

    def body_of(self, request: LLMRequest, model: str, episode: EpisodeSpec | None) -> dict[str, Any]:
        """As `EndpointPolicy.body_of`."""
        body = request_to_body(request, model=model, strict=self._strict, report=self._warn_once)
        return body if self._effort is None else {**body, "reasoning": {"effort": self._effort}}

    def read_answer(self, body: Any, report: Report) -> LLMResponse:
        """As `EndpointPolicy.read_answer`."""
        return response_from_body(body, strict=False, report=report)
