"""The policy for Anthropic's Messages API, with prompt caching, retries, limits, usage and cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from ares_exp.llms.anthropic_messages import StreamedMessage, request_to_body, response_from_body
from ares_exp.llms.request import LLMRequest
from ares_exp.policies.endpoint import EndpointWire
from ares_exp.policies.endpoint_policy import EndpointPolicy, Url, VariableName
from ares_exp.policies.policy import EpisodeSpec

CACHED_MESSAGES = 2
"""Number of most recent user messages that get a cache breakpoint, so that the next request can use the cache."""


@pydantic.dataclasses.dataclass(kw_only=True, eq=False, repr=False, config=pydantic.ConfigDict(extra="forbid"))
class AnthropicPolicy(EndpointPolicy):
    """Responds to requests with `POST {base_url}/messages`.

    The endpoint returns thinking with a signature. The agent's later requests repeat earlier responses as messages.
    The policy adds the signed thinking to these messages, because the endpoint requires it between tool calls.

    Attributes:
        base_url: URL of the endpoint, including the version. For a local server, use `http://127.0.0.1:8000/v1`. If the
            environment variable ANTHROPIC_BASE_URL is set, its value with `/v1` is the default of the option.
        max_output_tokens: Maximum number of generated tokens of one response, including thinking. The API requires this
            limit. Default: the agent's limit, or else 32,000.
        cache: Whether to mark the system prompt, tools and conversation for the endpoint's cache (`cache_control`).
            `True` uses the default lifetime of the endpoint's cache, and `5m` or `1h` sets the lifetime.
        thinking_tokens: Token budget for the model's thinking. It has to be below the maximum number of generated
            tokens. `None` requests no thinking. Newer models have other settings for thinking: set them in
            `extra_body`.
    """

    wire = EndpointWire(
        "anthropic",
        "messages",
        "content",
        response_from_body,
        StreamedMessage,
        key_header="x-api-key",
        headers={"anthropic-version": "2023-06-01"},
    )

    base_url: Url = "https://api.anthropic.com/v1"
    api_key_env: VariableName | None = "ANTHROPIC_API_KEY"
    thinking_tokens: Annotated[int, Field(ge=1024)] | None = None
    cache: Literal[False, True, "5m", "1h"] = True

    def body_of(self, request: LLMRequest, model: str, episode: EpisodeSpec | None) -> dict[str, Any]:
        """Returns the body of a request; see `EndpointPolicy.body_of`."""
        body = request_to_body(request, model=model, strict=self.strict, report=self._warn_once)
        if self.thinking_tokens is not None:
            body["thinking"] = {"type": "enabled", "budget_tokens": self.thinking_tokens}
        if self.cache:
            mark = {"type": "ephemeral"} | ({"ttl": self.cache} if isinstance(self.cache, str) else {})
            mark_for_cache(body, mark)
        return body


def mark_for_cache(body: dict[str, Any], mark: Mapping[str, Any]) -> None:
    """Sets cache breakpoints in the body of a request, each with the value `mark`.

    The first breakpoint follows the system prompt and the tools. The other two follow the last two user messages. The
    endpoint allows at most four breakpoints.
    """
    if "system" in body:
        if isinstance(body["system"], str):
            body["system"] = [{"type": "text", "text": body["system"]}]
        body["system"][-1] = {**body["system"][-1], "cache_control": mark}
    elif body.get("tools"):
        body["tools"][-1] = {**body["tools"][-1], "cache_control": mark}
    of_user = [message for message in body["messages"] if message["role"] == "user"]
    for message in of_user[-CACHED_MESSAGES:]:
        message["content"][-1] = {**message["content"][-1], "cache_control": mark}
