"""The Responses policy: endpoints of OpenAI's newer wire, with retries, bounds, token usage and cost."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import Field

from ares_exp.llms.openai_responses import StreamedResponse, request_to_body, response_from_body
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.llms.wire import Report
from ares_exp.policies.endpoint import EndpointWire
from ares_exp.policies.endpoint_policy import EndpointPolicy, Url, VariableName
from ares_exp.policies.policy import EpisodeSpec


@pydantic.dataclasses.dataclass(kw_only=True, eq=False, repr=False, config=pydantic.ConfigDict(extra="forbid"))
class OpenAIResponsesPolicy(EndpointPolicy):
    """Answers requests by `POST {base_url}/responses`. Nothing is stored at the endpoint: each request is whole.

    Reasoning comes back sealed, and is sent again with the messages that repeat the responses.

    Attributes:
        stop_sequences: Not part of this wire: refused, or with `strict=False` left out with a warning.
        reasoning_effort: How much the model is to think, as it calls it (`low`, `high`); `None` leaves it to the model.
    """

    wire = EndpointWire("openai_responses", "responses", "output", StreamedResponse)

    base_url: Url = "https://api.openai.com/v1"
    api_key_env: VariableName | None = "OPENAI_API_KEY"
    reasoning_effort: Annotated[str, Field(min_length=1)] | None = None

    def body_of(self, request: LLMRequest, model: str, episode: EpisodeSpec | None) -> dict[str, Any]:
        """As `EndpointPolicy.body_of`."""
        body = request_to_body(request, model=model, strict=self.strict, report=self._warn_once)
        return body if self.reasoning_effort is None else {**body, "reasoning": {"effort": self.reasoning_effort}}

    def read_response(self, body: Any, report: Report) -> LLMResponse:
        """As `EndpointPolicy.read_response`."""
        return response_from_body(body, strict=False, report=report)
