"""The chat-completions policy: any OpenAI-compatible endpoint, with retries, bounds, token usage and cost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import AfterValidator, Field

from ares_exp.errors import EndpointError, MalformedAnswerError, PreflightError, RefusalError
from ares_exp.llms.openai_chat import MaxTokensField, request_to_body, response_from_body
from ares_exp.llms.reasoning import KnownReasoning, ReasoningField, reasoning_to_message
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, ThinkingData
from ares_exp.llms.wire import shorten
from ares_exp.policies.endpoint import Endpoint
from ares_exp.policies.policy import EpisodeSpec, Policy
from ares_exp.policies.request_slots import OnWait
from ares_exp.policies.retry import Backoff

logger = logging.getLogger(__name__)

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_completion_tokens", "max_tokens",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "reasoning_effort", "logprobs", "top_logprobs", "n",
)  # fmt: skip
"""Fields of a request's body that are kept with the response: what a result depends on, and no secrets."""

REFUSED = ("refusal", "content_filter")
"""Finish reasons of an answer that is a refusal: the model's own, and a content filter's."""


@pydantic.dataclasses.dataclass(frozen=True, config=pydantic.ConfigDict(extra="forbid"))
class ModelPrice:
    """What a model costs, in US dollars per million tokens."""

    input_per_million_usd: Annotated[float, Field(ge=0)]
    output_per_million_usd: Annotated[float, Field(ge=0)]


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    _ = parts.port  # Raises ValueError for one that is out of range.
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("expected a URL such as https://api.openai.com/v1, up to and with the version")
    if parts.username is not None or parts.password is not None:
        raise ValueError("expected no user or password in the URL: keys come from the environment (api_key_env)")
    return url


def _ignore(_: float) -> None:
    """Does nothing."""


def _check_extra_body(extra_body: Mapping[str, Any]) -> Mapping[str, Any]:
    if own := sorted({"messages", "model", "n", "stream", "stream_options"}.intersection(extra_body)):
        raise ValueError(f"cannot set {', '.join(own)}: one whole answer of policy.model to the agent's messages")
    return extra_body


class ChatCompletionsPolicy(Policy):
    """Answers requests by `POST {base_url}/chat/completions`.

    A sampling parameter of this policy's wins over the agent's; what the policy leaves `None` is the agent's, and what
    both leave `None` is the engine's default. `extra_body` wins over all. Answers are asked for whole, also when the
    agent's request says `stream`. A field of an answer that an `LLMResponse` cannot carry is a warning whatever
    `strict` says: the answer is paid for.
    """

    @pydantic.validate_call
    def __init__(
        self,
        *,
        model: Annotated[str, Field(min_length=1)] | None,
        base_url: Annotated[str, AfterValidator(_check_url)] = "https://api.openai.com/v1",
        api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = "OPENAI_API_KEY",
        temperature: Annotated[float, Field(ge=0)] | None = None,
        top_p: Annotated[float, Field(gt=0, le=1)] | None = None,
        max_output_tokens: Annotated[int, Field(gt=0)] | None = None,
        stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None,
        seed: int | Literal["episode"] | None = None,
        timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0,
        max_retries: Annotated[int, Field(ge=0)] = 5,
        retry_base_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0,
        max_retry_wait_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0,
        max_concurrency: Annotated[int, Field(gt=0)] = 64,
        max_concurrency_per_episode: Annotated[int, Field(gt=0)] = 16,
        max_answer_bytes: Annotated[int, Field(gt=0)] = 64 * 2**20,
        preflight_timeout_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0,
        prices: Mapping[str, ModelPrice] | None = None,
        extra_body: Annotated[Mapping[str, Any], AfterValidator(_check_extra_body)] | None = None,
        max_tokens_field: MaxTokensField = "max_completion_tokens",
        on_refusal: Literal["answer", "error"] = "answer",
        send_reasoning: Literal[False, True, ReasoningField] = False,
        strict: bool = True,
    ) -> None:
        """Checks the settings; the key is read with the first request.

        Args:
            model: Name of the model, as the endpoint calls it. Needed: `preflight` refuses `None`, together with what
                else is missing.
            base_url: URL of the endpoint, up to and with the version; of a local server `http://127.0.0.1:8000/v1`. The
                option takes it from the environment variable OPENAI_BASE_URL, if that is set.
            api_key_env: Environment variable that holds the key; `None` for an endpoint that needs none.
            temperature: Sampling temperature. A value wins over the agent's; `None` keeps the agent's, or else the
                engine's default, here and in the next three.
            top_p: Nucleus sampling.
            max_output_tokens: Bound on the generated tokens of one answer.
            stop_sequences: Strings that end generation.
            seed: Sampling seed of every request; `"episode"` for the episode's own; `None` sends none.
            timeout_sec: Bound on one try in seconds, the whole answer included.
            max_retries: Further tries after 408, 409, 429, 5xx, a failed connection or a timeout.
            retry_base_sec: Wait before the first retry in seconds; doubled for each further one, with jitter.
            max_retry_wait_sec: Longest wait between tries; a `Retry-After` beyond it is an error.
            max_concurrency: Bound on requests under way at once. One that waits for a retry leaves its place to others,
                unless the endpoint said for how long (`Retry-After`): then all wait.
            max_concurrency_per_episode: Bound on requests of one episode under way at once, where its agent waits for
                several answers; 1 asks for one after the other.
            max_answer_bytes: Bound on the size of an answer.
            preflight_timeout_sec: Bound on the check before the run, in seconds.
            prices: US dollars per million tokens, by model name: `{gpt-x: {input_per_million_usd: 2.5,
                output_per_million_usd: 10}}`. Without one the cost is what the endpoint reports in `usage.cost`, else
                0.0: a warning under a limit in US dollars.
            extra_body: Further fields of the request body: `{top_k: 20, logprobs: true, return_token_ids: true}`.
            max_tokens_field: What the endpoint calls the bound on generated tokens; `max_tokens` for engines that know
                only the older name.
            on_refusal: What an answer that is a refusal does: `"answer"`, the agent gets to see it; `"error"`, it ends
                the episode. A request that is refused is an error in any case.
            send_reasoning: Whether the model's reasoning is sent back in the messages that repeat its answers: the name
                of the field that the endpoint reads, `reasoning_content` (also `true`), `reasoning` or
                `reasoning_details`. Other endpoints ignore such a field, refuse it, or charge for it.
            strict: Whether a field of the agent's request that the wire format lacks is an error (or a warning).
        """
        self._model = self.model_name = model
        self._sampling = {
            "temperature": temperature,
            "top_p": top_p,
            "max_output_tokens": max_output_tokens,
            "stop_sequences": stop_sequences,
        }
        self._seed = seed
        self._timeout_sec = timeout_sec
        self.max_concurrency_per_episode = max_concurrency_per_episode
        self._backoff = Backoff(max_retries=max_retries, base_sec=retry_base_sec, max_wait_sec=max_retry_wait_sec)
        self._preflight_timeout_sec = preflight_timeout_sec
        self._prices = dict(prices or {})
        self.knows_prices = bool(self._prices)
        self._extra_body = dict(extra_body or {})
        self._max_tokens_field: MaxTokensField = max_tokens_field
        self._on_refusal = on_refusal
        self._reasoning_field: ReasoningField | None = (
            "reasoning_content" if send_reasoning is True else send_reasoning or None
        )
        self._strict = strict
        self._warned: set[str] = set()
        self.unpriced: set[str] = set()
        self._endpoint = Endpoint(
            base_url=base_url,
            api_key_env=api_key_env,
            max_concurrency=max_concurrency,
            max_answer_bytes=max_answer_bytes,
        )

    def __repr__(self) -> str:
        return f"ChatCompletionsPolicy(model={self._model!r}, base_url={self._endpoint.base_url!r})"

    @property
    def _fixed_seed(self) -> int | None:
        return self._seed if isinstance(self._seed, int) else None

    async def preflight(self) -> None:
        """Checks that there are a model, the client and a key, and that the endpoint answers and takes the key.

        Raises:
            PreflightError: With the remedy; of everything that is missing.
        """
        model = (
            [] if self._model is not None else ["`policy.model` is needed and has no default: set `policy.model=…`."]
        )
        if missing := [*model, *self._endpoint.missing()]:
            raise PreflightError("\n".join(missing))
        await self._endpoint.check(timeout_sec=self._preflight_timeout_sec)

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """Returns the policy of one episode.

        It sends its seed (the low 31 bits) and the reasoning so far if asked to, and reports its waits.
        """
        seed = episode.seed % 2**31 if self._seed == "episode" else self._fixed_seed
        on_wait = episode.on_wait if episode.on_wait is not None else _ignore
        if self._reasoning_field is None:
            return _Bound(self, seed, on_wait)
        return _Remembering(self, seed, on_wait, KnownReasoning())

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Answers one request. Reasoning is sent back in episodes alone (`for_episode`): here nobody knows what is one.

        Raises:
            EndpointError: The endpoint gave no usable answer; the class says why.
            UnsendableRequestError: The request has no place in the wire format.
            MalformedAnswerError: What was answered is no chat completion.
        """
        if self._reasoning_field is not None:
            self._warn_once("policy.send_reasoning has no effect outside of episodes: use for_episode().")
        return await self.answer(request, seed=self._fixed_seed)

    async def answer(
        self,
        request: LLMRequest,
        *,
        seed: int | None,
        on_wait: OnWait = _ignore,
        reasoning: KnownReasoning | None = None,
    ) -> LLMResponse:
        """Answers one request, sampled with `seed`. Raises what calling the policy does.

        Args:
            request: The request.
            seed: Sampling seed; `None` sends none.
            on_wait: Is told of the seconds that the request waits before a try: before a retry, before they pass.
            reasoning: That of earlier answers, to be sent back with them.
        """
        body = self._body(request, seed)
        if reasoning is not None:
            body["messages"] = reasoning.put_into(body["messages"], self._with_reasoning)
        answer, latency_sec = await self._post(body, on_wait)
        try:
            response = response_from_body(answer, strict=False, report=self._warn_once)
        except MalformedAnswerError as error:
            malformed = self._endpoint.scrub(str(error))
        else:
            sampling = {name: body[name] for name in SAMPLING_FIELDS if name in body}
            response = replace(response, cost=self._cost(response), latency_sec=latency_sec, sampling=sampling)
            if not response.usage.total_tokens:
                self._warn_once(
                    f"{self._endpoint.base_url} reports no token usage: tokens count as 0, so that no limit on tokens "
                    "(`token_limit`, `budget.tokens`) and none on the cost that prices make of them holds."
                )
            if self._on_refusal == "error" and response.finish_reason in REFUSED:
                raise self._refusal(response)
            return response
        raise MalformedAnswerError(malformed)

    async def close(self) -> None:
        """Closes the connections. Idempotent."""
        await self._endpoint.close()

    def _body(self, request: LLMRequest, seed: int | None) -> dict[str, Any]:
        if self._model is None:
            raise PreflightError("preflight() comes first: it refuses a policy without a model.")
        ours: dict[str, Any] = {name: value for name, value in self._sampling.items() if value is not None}
        if "top_k" in self._extra_body:
            ours["top_k"] = None
        request = replace(request, stream=False, **ours)
        body = request_to_body(
            request,
            model=self._model,
            max_tokens_field=self._max_tokens_field,
            strict=self._strict,
            report=self._warn_once,
        )
        return body | ({} if seed is None else {"seed": seed}) | self._extra_body

    def _with_reasoning(self, message: Mapping[str, Any], pieces: Sequence[ThinkingData]) -> Mapping[str, Any]:
        return {**message, **reasoning_to_message(pieces, self._reasoning_field)}

    async def _post(self, body: Mapping[str, Any], on_wait: OnWait) -> tuple[Any, float]:
        """Returns the parsed answer and the seconds since the first try began."""
        slots, began = self._endpoint.slots, 0.0
        for tries in itertools.count(1):
            try:
                async with slots.one(on_wait):
                    began = began or time.perf_counter()
                    answer = await self._endpoint.post(body, timeout_sec=self._timeout_sec)
                return answer, time.perf_counter() - began
            except EndpointError as error:
                wait_sec = self._backoff.wait_sec(tries, error)
                if error.retry_after_sec is not None:
                    slots.pause(wait_sec)
                logger.info("%s Trying again in %.1f s (try %d failed).", error, wait_sec, tries)
            on_wait(wait_sec)
            await asyncio.sleep(wait_sec)
        raise AssertionError("unreachable: the backoff ends the loop")

    def _refusal(self, response: LLMResponse) -> RefusalError:
        said = self._endpoint.scrub(shorten(response.text))
        error = RefusalError(
            f"The model refuses to answer ({response.finish_reason}): {said}. "
            "policy.on_refusal=answer lets the agent see that and go on.",
            code=response.finish_reason,
        )
        error.answer = response
        return error

    def _cost(self, response: LLMResponse) -> float:
        price = self._prices.get(response.model or "") or self._prices.get(self._model or "")
        if price is None:
            if not response.cost:
                self.unpriced.add(response.model or str(self._model))
            return response.cost
        usage = response.usage
        dollars = usage.prompt_tokens * price.input_per_million_usd
        dollars += usage.generated_tokens * price.output_per_million_usd
        return dollars / 1e6

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


@dataclass(frozen=True, slots=True)
class _Bound:
    """The policy, bound to one episode."""

    policy: ChatCompletionsPolicy
    seed: int | None
    on_wait: OnWait

    @property
    def max_concurrency_per_episode(self) -> int:
        return self.policy.max_concurrency_per_episode

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        return await self.policy.answer(request, seed=self.seed, on_wait=self.on_wait)


@dataclass(frozen=True, slots=True)
class _Remembering:
    """The policy, bound to one episode, with the reasoning so far, which is sent back."""

    policy: ChatCompletionsPolicy
    seed: int | None
    on_wait: OnWait
    reasoning: KnownReasoning

    @property
    def max_concurrency_per_episode(self) -> int:
        return self.policy.max_concurrency_per_episode

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        answer = await self.policy.answer(request, seed=self.seed, on_wait=self.on_wait, reasoning=self.reasoning)
        self.remember(answer)
        return answer

    def advance(self, request: LLMRequest, answer: LLMResponse | None) -> None:
        """Remembers an answer that was given in its stead."""
        if answer is not None:
            self.remember(answer)

    def remember(self, answer: LLMResponse) -> None:
        """Remembers the reasoning of an answer of the episode."""
        self.reasoning.add(answer)
