"""Base class of policies for HTTP endpoints, with sampling, retries, limits, usage, cost, refusals and reasoning."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import AfterValidator, Field

from ares_exp.backoff import backoff_sec
from ares_exp.errors import (
    ConfigError,
    EndpointError,
    EndpointUnreachableError,
    MalformedResponseError,
    PreflightError,
    RefusalError,
    close_matches,
)
from ares_exp.llms.chat_messages import KnownReasoning, reasoning_to_message
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, ThinkingData, Usage
from ares_exp.llms.wire import Report, WarnOnce, shorten
from ares_exp.policies.endpoint import Endpoint, EndpointWire
from ares_exp.policies.policy import EpisodeSpec, Policy

logger = logging.getLogger(__name__)

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_sequences", "max_completion_tokens", "max_tokens",
    "max_output_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "reasoning_effort", "reasoning",
    "thinking", "output_config", "logprobs", "top_logprobs", "n", "typical_p", "min_tokens", "logit_bias", "bad_words",
    "allowed_token_ids", "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "json_schema", "regex", "ebnf",
)  # fmt: skip
"""Fields of a request body that are recorded with the response. They influence it, and contain no secrets."""

OWN_SAMPLING = ("temperature", "top_p", "max_output_tokens", "stop_sequences")

SHOWN_MODELS = 5
REFUSED = ("refusal", "content_filter")
"""Finish reasons of responses that are refusals, either by the model or by a content filter."""


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class ModelPrice:
    """The price of a model in US dollars per million tokens.

    Attributes:
        input_per_million_usd: Price of prompt tokens.
        output_per_million_usd: Price of generated tokens.
        cached_per_million_usd: Price of prompt tokens read from the cache. Default: the price of prompt tokens.
        cache_write_per_million_usd: Price of prompt tokens written to the cache. Default: the price of prompt tokens.
    """

    input_per_million_usd: Annotated[float, Field(ge=0)]
    output_per_million_usd: Annotated[float, Field(ge=0)]
    cached_per_million_usd: Annotated[float, Field(ge=0)] | None = None
    cache_write_per_million_usd: Annotated[float, Field(ge=0)] | None = None

    def cost(self, usage: Usage) -> float:
        """Returns the cost of a response in US dollars."""
        full = self.input_per_million_usd
        cached = full if self.cached_per_million_usd is None else self.cached_per_million_usd
        written = full if self.cache_write_per_million_usd is None else self.cache_write_per_million_usd
        fresh = max(0, usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens)
        dollars = fresh * full + usage.cached_tokens * cached + usage.cache_write_tokens * written
        return (dollars + usage.generated_tokens * self.output_per_million_usd) / 1e6


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    _ = parts.port  # raises ValueError if the port is out of range
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("expected a URL such as https://api.openai.com/v1, including the version")
    if parts.username is not None or parts.password is not None:
        raise ValueError("expected no user or password in the URL: keys come from the environment (api_key_env)")
    return url


def _check_extra_body(extra_body: Mapping[str, Any]) -> Mapping[str, Any]:
    if own := sorted({"messages", "input", "model", "n", "stream", "stream_options"}.intersection(extra_body)):
        raise ValueError(
            f"cannot set {', '.join(own)}, because these fields come from the agent's request, "
            "policy.model and policy.stream"
        )
    return extra_body


Url = Annotated[str, AfterValidator(_check_url)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
ModelName = Annotated[str, Field(min_length=1)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Temperature = Annotated[float, Field(ge=0)]
TopP = Annotated[float, Field(gt=0, le=1)]
StopSequences = list[Annotated[str, Field(min_length=1)]]


@pydantic.dataclasses.dataclass(kw_only=True, eq=False, repr=False, config=pydantic.ConfigDict(extra="forbid"))
class EndpointPolicy(Policy):
    """Responds to requests by posting them to an endpoint. Each subclass converts requests and responses for one API.

    Sampling parameters of the policy take precedence over the agent's. If the policy's value is `None`, the agent's
    value applies, and then the engine's default. `extra_body` takes precedence over all of them. The option `stream` of
    the policy, not the agent's request, decides whether a response is streamed.

    If a response contains a field that an `LLMResponse` cannot represent, the policy drops the field and logs a
    warning. This is not an error, even with `strict`, because the response was already paid for.

    The key is read from the environment when it is first needed, not when the policy is created.

    Attributes:
        model: Name of the model at the endpoint. Required: `preflight` rejects `None`.
        base_url: URL of the endpoint, including the version. For a local server, use `http://127.0.0.1:8000/v1`. The
            default of the option is the environment variable OPENAI_BASE_URL, if it is set.
        api_key_env: Environment variable with the key; `None` for an endpoint without a key.
        temperature: Sampling temperature. A value takes precedence over the agent's value. `None` keeps the agent's
            value or the engine's default. The same applies to the next three attributes.
        top_p: Threshold for nucleus sampling.
        max_output_tokens: Maximum number of generated tokens of one response.
        stop_sequences: Strings that end generation.
        stream: Whether to request streamed responses, for endpoints and proxies that time out on long responses. The
            response is the same, and an error within a stream is retried like any other error.
        stream_idle_sec: Maximum time in seconds between two events of a streamed response.
        timeout_sec: Time limit in seconds for one attempt, from the request to the complete response.
        max_retries: Maximum number of retries after 408, 409, 429, 5xx, a failed connection, an incomplete stream, or a
            timeout.
        retry_base_sec: Wait before the first retry in seconds; doubled for each further retry, with jitter.
        max_retry_wait_sec: Maximum wait before a retry in seconds. If the endpoint demands a longer wait
            (`Retry-After`), the request fails.
        max_concurrency: Maximum number of concurrent requests. A request that waits for its retry does not count. If
            the endpoint demands the wait (`Retry-After`), all other requests wait as well.
        max_concurrency_per_episode: Maximum number of concurrent requests of one episode, if its agent waits for
            several responses at once. With 1, requests are sent one after the other.
        max_response_bytes: Maximum size of a response in bytes.
        preflight_timeout_sec: Time limit in seconds of the check before the run (`preflight`).
        prices: US dollars per million tokens, by model name: `{gpt-x: {input_per_million_usd: 2.5,
            output_per_million_usd: 10}}`. Add `cached_per_million_usd` and `cache_write_per_million_usd` if the
            endpoint's cache has its own prices. Without a price, the cost is `usage.cost` from the endpoint, or else
            0.0. If the run has a limit in US dollars, an unknown cost causes a warning.
        extra_body: Additional fields of the request body: `{top_k: 20, logprobs: true, return_token_ids: true}`.
        on_refusal: Effect of a response that is a refusal. `"answer"` passes the response to the agent, and `"error"`
            ends the episode. A request that the endpoint rejects is always an error.
        strict: Whether an unsupported field in the agent's request is an error instead of a warning.
    """

    model: ModelName | None
    base_url: Url
    api_key_env: VariableName | None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    max_output_tokens: Count | None = None
    stop_sequences: StopSequences | None = None
    stream: bool = False
    stream_idle_sec: Seconds = 120.0
    timeout_sec: Seconds = 600.0
    max_retries: Annotated[int, Field(ge=0)] = 5
    retry_base_sec: Seconds = 1.0
    max_retry_wait_sec: Seconds = 60.0
    max_concurrency: Count = 64
    max_concurrency_per_episode: Count = 16
    max_response_bytes: Count = 64 * 2**20
    preflight_timeout_sec: Seconds = 30.0
    prices: Mapping[str, ModelPrice] | None = None
    extra_body: Annotated[Mapping[str, Any], AfterValidator(_check_extra_body)] | None = None
    on_refusal: Literal["answer", "error"] = "answer"
    strict: bool = True

    def __post_init__(self) -> None:
        """Creates the endpoint. The first request opens its connections."""
        self.model_name = self.model
        self.knows_prices = bool(self.prices)
        self._extra_body = dict(self.extra_body or {})
        self._warn_once = WarnOnce(logger)
        self._rng = random.Random()
        url = self.base_url.rstrip("/")
        if url != (base := url.removesuffix(f"/{self.wire.path}")):
            raise ConfigError(f"Expected `policy.base_url` without `/{self.wire.path}`. Set `policy.base_url={base}`.")
        self.unpriced: set[str] = set()
        self._endpoint = Endpoint(
            self.wire,
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            max_concurrency=self.max_concurrency,
            max_response_bytes=self.max_response_bytes,
            stream_idle_sec=self.stream_idle_sec,
        )

    @property
    @abstractmethod
    def wire(self) -> EndpointWire:
        """Format and path of requests to the API of the subclass."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={self.model!r}, base_url={self._endpoint.base_url!r})"

    def adjust(self, name: str, value: Any) -> Callable[[], None]:
        """Changes `max_concurrency` or `max_retries`; see `Policy.adjust`."""
        least = {"max_concurrency": 1, "max_retries": 0}.get(name)
        if least is None:
            return super().adjust(name, value)
        if type(value) is not int or value < least:
            raise ConfigError(f"Expected policy.{name} to be an int of at least {least}, got {value!r:.80}.")
        if name == "max_concurrency" and value > (most := self._endpoint.max_connections):
            raise ConfigError(
                f"Expected policy.max_concurrency to be at most {most:,} in a run in progress, got {value:,}."
            )

        def change() -> None:
            setattr(self, name, value)
            self._endpoint.slots.resize(self.max_concurrency)

        return change

    def use_key(self, key: str) -> None:
        """Sets an API key that is used instead of the key in `api_key_env`, and that is not part of the config."""
        self._endpoint.key = key

    def check_settings(self) -> None:
        """Checks that the model and the key are set, and that the package `openai` is installed.

        Raises:
            PreflightError: A requirement is missing. The message lists all problems and suggests fixes.
        """
        model = (
            [] if self.model is not None else ["`policy.model` is required and has no default. Set `policy.model=…`."]
        )
        if missing := [*model, *self._endpoint.missing()]:
            raise PreflightError("\n".join(missing))

    async def preflight(self) -> None:
        """Runs `check_settings`, and checks the endpoint and the key. Warns if the endpoint does not list the model.

        Raises:
            PreflightError: A setting is missing, or the endpoint cannot be used. The message suggests fixes.
        """
        self.check_settings()
        listed = await self._endpoint.check(timeout_sec=self.preflight_timeout_sec)
        stem = str(self.model).partition(":")[0].removesuffix("-latest")  # servers use different suffixes
        if listed and not any(stem in name for name in listed):
            shown = ", ".join(listed[:SHOWN_MODELS]) + (", …" if len(listed) > SHOWN_MODELS else "")
            self._warn_once(
                f"{self._endpoint.base_url} does not list the model `{self.model}`.{close_matches(stem, listed)} "
                f"It lists {shown}. Set `policy.model=…`."
            )

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """Returns a client for one episode.

        The client reports waits to the episode. It adds the reasoning of earlier responses if `_sends_reasoning`.
        """
        if not self._sends_reasoning:
            return _Bound(self, episode)
        reasoning = KnownReasoning()
        for llm_response in episode.earlier:
            reasoning.add(llm_response)
        return _Bound(self, episode, reasoning)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Responds to one request. Unlike a client from `for_episode`, adds no reasoning of earlier responses.

        Raises:
            EndpointError: The endpoint sent no usable response. The class identifies the reason.
            UnsendableRequestError: The wire format cannot represent the request.
            MalformedResponseError: The response does not follow the wire format.
        """
        return await self.respond(request)

    @abstractmethod
    def body_of(self, request: LLMRequest, model: str, episode: EpisodeSpec | None) -> dict[str, Any]:
        """Converts a request to the JSON body of an HTTP request. The caller adds `extra_body` and the stream fields.

        Args:
            request: Request to convert.
            model: Name of the model at the endpoint.
            episode: Episode of the request; `None` outside of episodes.

        Raises:
            UnsendableRequestError: The wire format cannot represent the request.
        """

    def read_response(self, body: Any, report: Report) -> LLMResponse:
        """Converts a parsed response body to a response. Calls `report` with a warning for each dropped field.

        Raises:
            MalformedResponseError: The body does not follow the wire format.
        """
        return self.wire.read(body, strict=False, report=report)

    def with_reasoning(self, message: Mapping[str, Any], pieces: Sequence[ThinkingData]) -> Mapping[str, Any]:
        """Adds the reasoning `pieces` of an earlier response to the message that repeats it in a later request.

        Default: adds only signed or encrypted reasoning, because endpoints require it. Returns a copy of the message.
        """
        sealed = [piece for piece in pieces if piece.signature or piece.redacted]
        return {**message, **reasoning_to_message(sealed, "reasoning_details")}

    @property
    def _sends_reasoning(self) -> bool:
        """Whether requests contain the reasoning of earlier responses. Default: yes."""
        return True

    async def respond(
        self,
        request: LLMRequest,
        *,
        episode: EpisodeSpec | None = None,
        reasoning: KnownReasoning | None = None,
    ) -> LLMResponse:
        """Responds to one request of an episode. Raises the same errors as `__call__`.

        Args:
            request: Request to send.
            episode: Episode of the request, if it is known.
            reasoning: Reasoning of earlier responses, to add to the messages that repeat them.
        """
        if reasoning is not None:
            request = replace(request, messages=reasoning.put_into(request.messages, self.with_reasoning))
        if self.model is None:
            raise PreflightError("The policy has no model. Set policy.model, and call preflight() first.")
        body = self.body_of(self._with_own_settings(request), self.model, episode) | self._extra_body
        body |= self.wire.stream_fields if self.stream else {}
        return await self.response_to(body, episode or EpisodeSpec(""))

    async def response_to(self, body: Mapping[str, Any], episode: EpisodeSpec) -> LLMResponse:
        """Posts a complete request body and converts the response. Raises the same errors as `__call__`."""
        llm_response, version, latency_sec = await self._post(body, episode)
        try:
            response = self.read_response(llm_response, self._warn_once)
        except MalformedResponseError as error:
            malformed = self._endpoint.scrub(str(error))
        else:
            sampling = {name: body[name] for name in SAMPLING_FIELDS if name in body}
            response = replace(response, cost=self._cost(response), latency_sec=latency_sec, sampling=sampling)
            if response.policy_version is None:
                response = replace(response, **version)
            elif response.policy_version_from is None:
                response = replace(response, policy_version_from="body")
            if not response.usage.total_tokens:
                self._warn_once(
                    f"{self._endpoint.base_url} reports no token usage, so tokens count as 0. Limits on tokens "
                    "(`limits.tokens`, `budget.tokens`), and limits on costs that are computed from prices, "
                    "have no effect."
                )
            if self.on_refusal == "error" and response.finish_reason in REFUSED:
                refusal = RefusalError(
                    f"The model refuses to answer ({response.finish_reason}): "
                    f"{self._endpoint.scrub(shorten(response.text))}. "
                    "Use policy.on_refusal=answer to pass the refusal to the agent.",
                    code=response.finish_reason,
                )
                refusal.response = response
                raise refusal
            return response
        raise MalformedResponseError(malformed)

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        await self._endpoint.close()

    def _with_own_settings(self, request: LLMRequest) -> LLMRequest:
        """Returns the request with the policy's sampling parameters, and without the agent's choice of streaming."""
        ours: dict[str, Any] = {name: value for name in OWN_SAMPLING if (value := getattr(self, name)) is not None}
        if "top_k" in self._extra_body:
            ours["top_k"] = None
        return replace(request, stream=False, **ours)

    def version_at(self, episode: EpisodeSpec) -> dict[str, Any]:
        """Returns the version of the weights, for a response that does not contain the version.

        The result has the fields `policy_version` and `policy_version_from` of an `LLMResponse`. It is empty if no
        trainer has announced a version.
        """
        version = episode.version()
        return {} if version is None else {"policy_version": version, "policy_version_from": "announced"}

    async def _post(self, body: Mapping[str, Any], episode: EpisodeSpec) -> tuple[Any, dict[str, Any], float]:
        """Posts a request body, and retries if necessary.

        Returns the parsed response body, the result of `version_at` before the successful attempt, and the seconds
        since the first attempt.
        """
        slots, started, tries = self._endpoint.slots, 0.0, 0
        while True:
            try:
                async with slots.one(episode.on_wait):
                    await episode.may_ask()
                    started = started or time.perf_counter()
                    version = self.version_at(episode)
                    llm_response = await self._endpoint.post(
                        body, timeout_sec=self.timeout_sec, headers=episode.headers
                    )
                return llm_response, version, time.perf_counter() - started
            except EndpointError as error:
                if (
                    isinstance(error, EndpointUnreachableError)
                    and error.never_connected
                    and episode.until_reachable is not None
                    and await episode.until_reachable(error, self._endpoint.check_reachable)
                ):
                    continue  # an outage is not a failed try
                tries += 1
                wait_sec = self.retry_wait_sec(tries, error)
                if error.retry_after_sec is not None:
                    slots.pause(wait_sec)
                logger.info("%s Retrying in %.1f s (request %d failed).", error, wait_sec, tries)
            episode.on_wait(wait_sec)
            await asyncio.sleep(wait_sec)

    def retry_wait_sec(self, tries: int, error: EndpointError) -> float:
        """Returns the seconds to wait after attempt number `tries` (starting at 1) failed with `error`.

        The wait is exponential with jitter, or as the endpoint demands.

        Raises:
            EndpointError: The error is not retryable, or a limit on retries is reached: `max_retries` is used up, or
                the endpoint demands a wait of more than `max_retry_wait_sec`.
        """
        most_sec = self.max_retry_wait_sec
        if not error.retryable:
            raise error
        if tries > self.max_retries:
            count = "1 request" if tries == 1 else f"{tries} requests"
            raise _final(error, f"Gave up after {count} (policy.max_retries={self.max_retries}).")
        if error.retry_after_sec is None:
            return backoff_sec(tries, base_sec=self.retry_base_sec, max_sec=most_sec, rng=self._rng)
        if error.retry_after_sec > most_sec:
            raise _final(
                error,
                f"The server asks to wait {error.retry_after_sec:.0f} s, "
                f"more than policy.max_retry_wait_sec={most_sec:g}.",
            )
        # Never earlier than requested. The jitter keeps requests that failed together from being retried at the same
        # time.
        return min(most_sec, error.retry_after_sec + self.retry_base_sec * self._rng.uniform(0.0, 0.5))

    def _cost(self, response: LLMResponse) -> float:
        prices = self.prices or {}
        price = prices.get(response.model or "") or prices.get(self.model or "")
        if price is None:
            if not response.cost:
                self.unpriced.add(response.model or str(self.model))
            return response.cost
        return price.cost(response.usage)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The client of one episode. `reasoning` stores the reasoning of its responses, to add it to later requests."""

    policy: EndpointPolicy
    episode: EpisodeSpec
    reasoning: KnownReasoning | None = None

    @property
    def max_concurrency_per_episode(self) -> int:
        return self.policy.max_concurrency_per_episode

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        llm_response = await self.policy.respond(request, episode=self.episode, reasoning=self.reasoning)
        self.advance(request, llm_response)
        return llm_response

    def advance(self, request: LLMRequest, llm_response: LLMResponse | None) -> None:
        if self.reasoning is not None and llm_response is not None:
            self.reasoning.add(llm_response)


def _final(error: EndpointError, why: str) -> EndpointError:
    return type(error)(f"{error} {why}", status=error.status, code=error.code, retry_after_sec=error.retry_after_sec)
