"""The relay: a queue of LLM requests as token ids. The trainer fetches the requests and posts the sampled ids."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from ares_exp.cancellation import happened
from ares_exp.errors import ConfigError, ContextOverflowError, WireFormatError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.llms.wire import WarnOnce
from ares_exp.policies.in_process.chat_template import ChatTemplates
from ares_exp.policies.in_process.sampling import DEFAULT_MAX_OUTPUT_TOKENS, PROCESSED_LOGPROBS
from ares_exp.policies.in_process.token_client import TokenClient, TokenRequest, sampled_text, sampling_of
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.waiting import reported
from ares_exp.records.validation import validated
from ares_exp.training.service.bodies import SampledBody

MAX_CONCURRENCY_PER_EPISODE = 16
"""Maximum number of concurrent requests of one episode."""
REQUEST_LEASE_SEC = 300.0
"""Time in seconds after which a request without a response can be fetched again."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Limits:
    """The sampling parameters that the relay itself uses, and therefore validates."""

    max_tokens: Annotated[int, Field(strict=True, ge=1)] = DEFAULT_MAX_OUTPUT_TOKENS
    stop: list[Annotated[str, Field(min_length=1)]] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _OpenRequest:
    """A request without a response. The trainer cannot fetch it again before `lease_end`, in the event loop's time."""

    rollout_id: str
    prompt: Sequence[int]
    sampling: Mapping[str, Any]
    spec: EpisodeSpec
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    lease_end: float = -math.inf
    version: str | None = None
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    response: asyncio.Future[SampledBody] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Relay:
    """The queue of LLM requests that wait for the trainer's responses. Use it only on the event loop of the run.

    Each request that the trainer fetches has a lease. If no response arrives before the lease ends, the request can be
    fetched again.

    Attributes:
        templates: Chat templates of the models. Policies that send token ids to endpoints also use them.
        lease_sec: Duration of the lease of a request, in seconds.
    """

    def __init__(self, lease_sec: float = REQUEST_LEASE_SEC) -> None:
        """Creates a relay without requests."""
        self.lease_sec = lease_sec
        self._open: dict[str, _OpenRequest] = {}
        self._changed = asyncio.Event()
        self.templates = ChatTemplates()
        self._warn_once = WarnOnce(logger)

    async def requests(
        self, wait: float, limit: int, rollout_ids: Collection[str] | None = None
    ) -> list[dict[str, Any]]:
        """Returns open requests as dicts with the fields of `TokenRequestFacts`, from the oldest to the newest.

        Args:
            wait: Maximum time in seconds to wait for a request. If no request arrives, the list is empty.
            limit: Maximum number of requests.
            rollout_ids: Rollouts whose requests are returned. `None` means all rollouts.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + wait
        while True:
            wanted = [one for one in self._open.values() if rollout_ids is None or one.rollout_id in rollout_ids]
            if found := [one for one in wanted if one.lease_end <= clock()]:
                return [self._hand_out(one) for one in found[:limit]]
            due = min([until, *(one.lease_end for one in wanted)])
            if until <= clock():
                return []
            self._changed.clear()
            await happened(self._changed, due - clock())

    def respond(self, response: SampledBody) -> bool:
        """Passes the trainer's response to the episode that waits for it. Returns whether the response was used.

        Raises:
            WireFormatError: The response has more than `max_tokens` tokens. The request stays open.
        """
        one = self._open.get(response.request_id)
        if one is None or one.response.done():
            return False
        if len(response.ids) > (most := one.sampling["max_tokens"]):
            raise WireFormatError(f"Expected at most {most} token ids (sampling.max_tokens), got {len(response.ids)}.")
        one.response.set_result(response)
        return True

    def policy_for(
        self, rollout_id: str, model: str, sampling: Mapping[str, Any], spec: EpisodeSpec | None = None
    ) -> LLMClient:
        """Returns a client for one episode, whose tokens are sampled by the trainer.

        Args:
            rollout_id: Rollout of the episode.
            model: Directory of the model's tokenizer, or its name on the hub.
            sampling: Sampling parameters that take precedence over the agent's: `temperature`, `top_p`, `max_tokens`,
                `stop`, and others of the trainer's engine.
            spec: Episode of the client.
        """
        return TokenClient(
            spec=spec or EpisodeSpec(""),
            load=lambda: self.templates.of(model),
            prepare=partial(_prepared, sampling),
            sample=partial(self._sample, rollout_id, model, sampling),
            warn=self._warn_once,
            max_concurrency_per_episode=MAX_CONCURRENCY_PER_EPISODE,
            continues_aborted=True,
        )

    def check(self, sampling: Mapping[str, Any]) -> None:
        """Checks the sampling parameters of `policy_for`.

        Raises:
            ConfigError: A parameter is invalid.
        """
        try:
            validated(_Limits, sampling)
        except ValueError as error:
            raise ConfigError(f"The sampling parameters of the submission are invalid: {error}.") from None

    async def sampled(
        self, rollout_id: str, prompt: Sequence[int], sampling: Mapping[str, Any], spec: EpisodeSpec
    ) -> tuple[SampledBody, str | None]:
        """Adds a request, and waits for the response. Returns the response and the version of the weights.

        The time until the trainer fetches the request does not count towards the time limits of the episode.
        """
        await spec.may_ask()
        one = _OpenRequest(rollout_id, prompt, sampling, spec)
        self._open[one.request_id] = one
        self._changed.set()
        try:
            with reported(spec.on_wait):
                await one.taken.wait()
            response = await one.response
        finally:
            del self._open[one.request_id]
        return response, response.version or one.version

    def _hand_out(self, one: _OpenRequest) -> dict[str, Any]:
        one.lease_end = asyncio.get_running_loop().time() + self.lease_sec
        one.version = one.spec.version()
        one.taken.set()
        return {
            "request_id": one.request_id,
            "rollout_id": one.rollout_id,
            "prompt_ids": [*one.prompt],
            "sampling": {**one.sampling},
            "deadline": time.time() + self.lease_sec,
        }

    async def _sample(self, rollout_id: str, model: str, chosen: Mapping[str, Any], asked: TokenRequest) -> LLMResponse:
        started = time.perf_counter()
        request = asked.request
        sampling = {
            **sampling_of(request),
            **chosen,
            "max_tokens": request.max_output_tokens or DEFAULT_MAX_OUTPUT_TOKENS,
            "stop": [*(request.stop_sequences or ())],
        }
        sampled, version = await self.sampled(rollout_id, asked.prompt, sampling, asked.spec)
        if not sampled.ids and sampled.stop == "length":
            raise ContextOverflowError(f"The prompt has {len(asked.prompt)} tokens and leaves no room for a response.")
        template = await self.templates.of(model)
        return LLMResponse.from_text(
            sampled_text(template, sampled.ids, template.ends, sampling["stop"]),
            usage=Usage(len(asked.prompt), len(sampled.ids)),
            prompt_token_ids=asked.prompt,
            completion_token_ids=sampled.ids,
            logprobs=sampled.logprobs,
            finish_reason=sampled.stop,
            model=model,
            latency_sec=time.perf_counter() - started,
            sampling={**sampling, **PROCESSED_LOGPROBS},  # trainers report logprobs at the sampling temperature
            policy_version=version,
            policy_version_from=None if version is None else "body" if sampled.version else "announced",
        )


def _prepared(chosen: Mapping[str, Any], request: LLMRequest) -> LLMRequest:
    tokens = chosen.get("max_tokens", request.max_output_tokens)
    stop = chosen.get("stop", request.stop_sequences)
    return replace(request, max_output_tokens=tokens, stop_sequences=stop)
