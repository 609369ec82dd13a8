"""The chat-completions policy, for any OpenAI-compatible endpoint, with retries, limits, token usage and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pydantic

from ares_exp.llms.chat_messages import ReasoningField, reasoning_to_message
from ares_exp.llms.openai_chat import MaxTokensField, StreamedCompletion, request_to_body, response_from_body
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, ThinkingData
from ares_exp.policies.endpoint import EndpointWire
from ares_exp.policies.endpoint_policy import EndpointPolicy, Url, VariableName
from ares_exp.policies.policy import EpisodeSpec


@pydantic.dataclasses.dataclass(kw_only=True, eq=False, repr=False, config=pydantic.ConfigDict(extra="forbid"))
class OpenAIPolicy(EndpointPolicy):
    """Responds to requests with `POST {base_url}/chat/completions`.

    Attributes:
        seed: Sampling seed that each request contains. `"episode"` sends the seed of the episode, and `None` sends no
            seed.
        max_tokens_field: Name of the request field for the maximum number of generated tokens. Use `max_tokens` for
            engines that only support this older name.
        send_reasoning: Whether later requests contain the reasoning of earlier responses. The value names the field
            that the endpoint expects: `reasoning_content` (also `true`), `reasoning` or `reasoning_details`. Endpoints
            that do not expect reasoning may ignore the field, reject it, or charge for it.
    """

    wire = EndpointWire(
        "openai",
        "chat/completions",
        "choices",
        response_from_body,
        StreamedCompletion,
        {"stream": True, "stream_options": {"include_usage": True}},
    )

    base_url: Url = "https://api.openai.com/v1"
    api_key_env: VariableName | None = "OPENAI_API_KEY"
    seed: int | Literal["episode"] | None = None
    max_tokens_field: MaxTokensField = "max_completion_tokens"
    send_reasoning: Literal[False, True, ReasoningField] = False

    @property
    def _reasoning_field(self) -> ReasoningField | None:
        return "reasoning_content" if self.send_reasoning is True else self.send_reasoning or None

    @property
    def _sends_reasoning(self) -> bool:
        return self._reasoning_field is not None

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Responds to one request. Warns if `send_reasoning` is set, which has no effect outside of episodes."""
        if self._reasoning_field is not None:
            self._warn_once("policy.send_reasoning has no effect outside of episodes: use for_episode().")
        return await super().__call__(request)

    def body_of(self, request: LLMRequest, model: str, episode: EpisodeSpec | None) -> dict[str, Any]:
        """Returns a request's body; see `EndpointPolicy.body_of`. Sends only the low 31 bits of an episode's seed."""
        body = request_to_body(
            request,
            model=model,
            max_tokens_field=self.max_tokens_field,
            strict=self.strict,
            report=self._warn_once,
        )
        seed = self.seed
        if seed == "episode":
            seed = None if episode is None else episode.seed % 2**31
        return body if seed is None else {**body, "seed": seed}

    def with_reasoning(self, message: Mapping[str, Any], pieces: Sequence[ThinkingData]) -> Mapping[str, Any]:
        """Adds the reasoning in the field that `send_reasoning` names; see `EndpointPolicy.with_reasoning`."""
        return {**message, **reasoning_to_message(pieces, self._reasoning_field)}
