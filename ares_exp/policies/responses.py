"""The policy for OpenAI's Responses API, with retries, limits, token usage and cost."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import Field

from ares_exp.llms.openai_responses import StreamedResponse, request_to_body, response_from_body
from ares_exp.llms.request import LLMRequest
from ares_exp.policies.endpoint import EndpointWire
from ares_exp.policies.endpoint_policy import EndpointPolicy, Url, VariableName
from ares_exp.policies.policy import EpisodeSpec


@pydantic.dataclasses.dataclass(kw_only=True, eq=False, repr=False, config=pydantic.ConfigDict(extra="forbid"))
class OpenAIResponsesPolicy(EndpointPolicy):
    """Responds to requests with `POST {base_url}/responses`.

    Each request contains the complete conversation, so the endpoint need not store anything.

    The endpoint returns encrypted reasoning. The agent's later requests contain the earlier responses as messages, and
    the policy adds the encrypted reasoning to these messages.

    Attributes:
        stop_sequences: Not supported by this API. A value is an error, or is ignored with a warning if `strict=False`.
        reasoning_effort: Reasoning effort, for example `low` or `high`. The model determines the valid values. `None`
            uses the model's default.
    """

    wire = EndpointWire("openai_responses", "responses", "output", response_from_body, StreamedResponse)

    base_url: Url = "https://api.openai.com/v1"
    api_key_env: VariableName | None = "OPENAI_API_KEY"
    reasoning_effort: Annotated[str, Field(min_length=1)] | None = None

    def body_of(self, request: LLMRequest, model: str, episode: EpisodeSpec | None) -> dict[str, Any]:
        """Returns the body of a request; see `EndpointPolicy.body_of`."""
        body = request_to_body(request, model=model, strict=self.strict, report=self._warn_once)
        return body if self.reasoning_effort is None else {**body, "reasoning": {"effort": self.reasoning_effort}}
