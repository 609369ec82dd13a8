"""The client of one episode for an engine whose prompts and responses are token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ares_exp.cancellation import in_thread
from ares_exp.errors import ContextOverflowError, UnsendableRequestError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse, TextData, ToolCallData
from ares_exp.policies.in_process.chat_template import (
    ChatTemplate,
    Conversations,
    digest_of,
    prompt_of,
    response_pieces,
)
from ares_exp.policies.in_process.sampling import DEFAULT_MAX_OUTPUT_TOKENS, NEUTRAL_SAMPLING
from ares_exp.policies.policy import EpisodeSpec

ABORT, MAX_ABORTED = "abort", 16
"""The finish reason of an aborted response, and the maximum number of consecutive aborts without a new token."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request as token ids.

    Attributes:
        request: Request after the policy's settings were applied.
        name: Name of the request: a digest of the prompt, and the number of earlier requests of the episode with the
            same prompt. The name is the same in every run, so that random seeds can be derived from it.
    """

    prompt: Sequence[int]
    request: LLMRequest
    spec: EpisodeSpec
    name: str


@dataclass(eq=False, slots=True, kw_only=True)
class TokenClient:
    """Renders the requests of one episode as token ids, and converts the sampled ids to responses.

    Attributes:
        spec: Episode of the client.
        load: Function that returns the chat template of the model.
        prepare: Function that applies the policy's settings to a request.
        sample: Function that samples a response. Its only piece is the sampled text, including special tokens.
        warn: Callback for warnings.
        strict: Whether a forced tool call is an error instead of a warning.
        continues: Whether to continue conversations with the token ids of earlier responses.
        continues_aborted: Whether to continue responses that the engine aborts, from the token ids sampled so far.
        max_concurrency_per_episode: Maximum number of concurrent requests of the episode.
    """

    spec: EpisodeSpec
    load: Callable[[], Awaitable[ChatTemplate]]
    prepare: Callable[[LLMRequest], LLMRequest]
    sample: Callable[[TokenRequest], Awaitable[LLMResponse]]
    warn: Callable[[str], None]
    max_concurrency_per_episode: int = 1
    strict: bool = True
    continues: bool = True
    continues_aborted: bool = False
    _conversations: Conversations = field(default_factory=Conversations)
    _occurrences: Counter[str] = field(default_factory=Counter)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Responds to one request.

        Raises:
            UnsendableRequestError: The template cannot represent the request, or `strict` forbids a forced tool call.
        """
        request = self._without_forced_call(self.prepare(request))
        template = await self.load()
        known = self._conversations if self.continues else Conversations()
        prompt = await in_thread(lambda: prompt_of(template, request, known, self.warn))
        digest = digest_of(prompt)
        occurrence = self._occurrences[digest]
        self._occurrences[digest] += 1
        response = await self._sampled(template, TokenRequest(prompt, request, self.spec, f"{digest}/{occurrence}"))
        pieces = response_pieces(
            template, request, prompt=prompt, text=response.text, call_id=f"call_{digest[:8]}_{occurrence}"
        )
        has_calls = any(isinstance(one, ToolCallData) for one in pieces)
        finish_reason = "tool_calls" if has_calls else response.finish_reason
        response = replace(response, data=tuple(pieces), finish_reason=finish_reason)
        self._conversations.add(request, response)
        return response

    async def _sampled(self, template: ChatTemplate, asked: TokenRequest) -> LLMResponse:
        """Samples a response. With `continues_aborted`, completes an aborted response, perhaps with newer weights."""
        parts, finish = [await self.sample(asked)], None
        limit = asked.request.max_output_tokens or DEFAULT_MAX_OUTPUT_TOKENS
        while self.continues_aborted and parts[-1].finish_reason == ABORT:
            ids = _ids_of(parts)
            if len(parts) >= MAX_ABORTED and not _ids_of(parts[-MAX_ABORTED:]):
                break
            if len(ids) >= limit:
                finish = "length"
                break
            rest = replace(asked.request, max_output_tokens=limit - len(ids))
            try:
                parts.append(await self.sample(replace(asked, prompt=[*asked.prompt, *ids], request=rest)))
            except ContextOverflowError:
                if not ids:
                    raise
                finish = "length"
                break
        if len(parts) == 1 and finish is None:
            return parts[0]
        joined = _joined(parts, finish)
        if not (ids := _ids_of(parts)):
            return joined
        text = sampled_text(template, ids, template.ends, asked.request.stop_sequences or ())
        return replace(joined, data=(TextData(text),))

    def advance(self, request: LLMRequest, response: LLMResponse | None) -> None:
        """Stores a response from another source, such as a log, so that later requests can continue its token ids."""
        if response is not None and response.prompt_token_ids is not None:
            self._occurrences[digest_of(response.prompt_token_ids)] += 1
            self._conversations.add(self.prepare(request), response)

    def _without_forced_call(self, request: LLMRequest) -> LLMRequest:
        if request.tool_choice in (None, "auto", "none"):
            return request
        message = (
            f"The agent sets `tool_choice` to {request.tool_choice!r:.80}, but the policy cannot force a tool call. "
            "If the policy has the option `strict`, set policy.strict=false to let the model choose."
        )
        if self.strict:
            raise UnsendableRequestError(message)
        self.warn(message)
        return replace(request, tool_choice="auto")


def _ids_of(parts: Sequence[LLMResponse]) -> list[int]:
    return [one for part in parts for one in part.completion_token_ids or ()]


def _joined(parts: Sequence[LLMResponse], finish: str | None) -> LLMResponse:
    sampled = [part for part in parts if part.completion_token_ids]

    def names(name: str) -> str | None:
        found = (one for part in sampled for one in (getattr(part, name) or "").split("+"))
        return "+".join(filter(None, dict.fromkeys(found))) or None

    return replace(
        parts[-1],
        cost=sum(part.cost for part in parts),
        usage=replace(parts[0].usage, generated_tokens=sum(part.usage.generated_tokens for part in parts)),
        prompt_token_ids=parts[0].prompt_token_ids,
        completion_token_ids=_ids_of(parts),
        logprobs=[one for part in sampled for one in part.logprobs or ()],
        finish_reason=finish or parts[-1].finish_reason,
        latency_sec=sum(part.latency_sec or 0.0 for part in parts),
        sampling=parts[0].sampling,
        policy_version=names("policy_version"),
        policy_version_from=names("policy_version_from"),
    )


def sampling_of(request: LLMRequest) -> dict[str, Any]:
    """Returns all sampling parameters. Unset ones get neutral values, because engines have other defaults."""
    asked = {"temperature": request.temperature, "top_p": request.top_p, "top_k": request.top_k}
    return {**NEUTRAL_SAMPLING, **{name: value for name, value in asked.items() if value is not None}}


def sampled_text(template: ChatTemplate, ids: Sequence[int], ends: frozenset[int], stop: Sequence[str]) -> str:
    """Returns the text of sampled ids up to the first stop string, without the token that ended the response."""
    text = template.decode(ids[:-1] if ends.intersection(ids[-1:]) else ids)
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else text
