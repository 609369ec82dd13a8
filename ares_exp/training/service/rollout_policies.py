"""The policies of a service, which send the LLM calls of each rollout to its trainer: to an endpoint, or to the relay.

The relay is a queue of LLM requests as token ids. The trainer fetches the requests and posts the sampled ids.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError

from ares_exp.cancellation import happened
from ares_exp.config.parts import has_members
from ares_exp.errors import ConfigError, ContextOverflowError, EndpointError, PolicyError, WireFormatError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse, Usage
from ares_exp.llms.wire import WarnOnce
from ares_exp.policies.anthropic import AnthropicPolicy
from ares_exp.policies.asked_ahead import concurrency_of
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.policies.endpoint_policy import OWN_SAMPLING, EndpointPolicy
from ares_exp.policies.in_process.chat_template import ChatTemplates
from ares_exp.policies.in_process.sampling import DEFAULT_MAX_OUTPUT_TOKENS, PROCESSED_LOGPROBS
from ares_exp.policies.in_process.token_client import (
    ABORT,
    MAX_ABORTED,
    TokenClient,
    TokenRequest,
    sampled_text,
    sampling_of,
)
from ares_exp.policies.policy import AdvancingClient, EpisodeSpec, Policy
from ares_exp.policies.responses import OpenAIResponsesPolicy
from ares_exp.policies.token_endpoint import SglangPolicy, TokenEndpointPolicy, VllmPolicy
from ares_exp.policies.waiting import reported
from ares_exp.records.secrets import protect
from ares_exp.records.validation import explain_validation, validated
from ares_exp.runs.scheduler import Slot
from ares_exp.training.service.bodies import PolicyBody, SampledBody

if TYPE_CHECKING:
    from ares_exp.training.service.served_rollouts import Rollout

ENV = "env:"
FIELDS = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "stop": "stop_sequences"}
"""Maps names of sampling parameters in a submission to names of policy arguments, where the two names differ."""
WIRES: Mapping[str, type[EndpointPolicy]] = {
    "chat": OpenAIPolicy,
    "responses": OpenAIResponsesPolicy,
    "messages": AnthropicPolicy,
    "ids": VllmPolicy,
    "sglang": SglangPolicy,
}
"""The policy for each API of an endpoint (`PolicyBody.wire`)."""
MAX_CONCURRENCY_PER_EPISODE = 16
"""Maximum number of concurrent requests of one episode in the relay."""
REQUEST_LEASE_SEC = 300.0
"""Time in seconds after which a request without a response can be fetched again."""

logger = logging.getLogger(__name__)


def endpoint_policy(body: PolicyBody, *, needs_tokens: bool) -> EndpointPolicy:
    """Creates the policy for the endpoint of a submission. Checks its settings, without connecting to the endpoint.

    Raises:
        UserError: A setting is missing or invalid.
    """
    if body.base_url is None:
        raise ConfigError('Expected `policy.base_url` with `mode: "endpoint"`, got none. Set the URL of the endpoint.')
    continues = body.on_abort == "continue"
    takes_ids = body.wire in ("ids", "sglang")
    if continues and not takes_ids:
        raise ConfigError(
            f'Expected `policy.wire` "ids" or "sglang" with `on_abort: "continue"`, got "{body.wire}". Set '
            'the wire, or use `on_abort: "resample"`.'
        )
    named = {FIELDS.get(name, name): value for name, value in body.sampling.items()}
    own = {name: named.pop(name) for name in OWN_SAMPLING if name in named}
    kind = VllmPolicy if body.wire == "chat" and needs_tokens else WIRES[body.wire]
    key = body.key or ""
    more: dict[str, Any] = {}
    if takes_ids:
        more = {"continue_tokens": body.needs_tokenizer, "tokenizer": body.tokenizer}
    try:
        policy = kind(
            model=body.model,
            base_url=body.base_url,
            api_key_env=key.removeprefix(ENV) if key.startswith(ENV) else None,
            extra_body={**named, **body.extra_body},
            strict=False,
            max_concurrency=1024,
            **own,
            **more,
        )
    except ValidationError as error:
        raise ConfigError(f"The policy of the submission is invalid: {explain_validation(error)}.") from None
    if isinstance(policy, TokenEndpointPolicy):
        policy.continues_aborted = continues
    if key and not key.startswith(ENV):
        protect([key])
        policy.use_key(key)
    policy.check_settings()
    return policy


class RolloutPolicies(Policy):
    """The policy of a service. It sends the calls of each rollout to the endpoint, or the relay, of its submission.

    Rollouts with the same endpoint share its connections. Use an instance on only one event loop.

    Attributes:
        in_flight: Number of calls that wait for a response from an endpoint or a trainer.
        drained: Event that is set while no call is in flight, once the first call has ended.
        relay: Queue of the requests of rollouts with the policy mode `relay`.
        version: Current version of the weights, for responses without a version.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.relay = Relay()
        self.version: str | None = None
        self.drained = asyncio.Event()
        self._rollouts: dict[Slot, tuple[Rollout, str]] = {}
        self._shared: dict[str, EndpointPolicy] = {}

    async def check(self, bodies: list[PolicyBody], *, needs_tokens: bool) -> None:
        """Checks the policies of a submission, and loads the tokenizers that they need.

        Raises:
            UserError: A policy cannot be used.
        """
        different = {_key_of(body, needs_tokens): body for body in bodies}
        for body in different.values():
            if body.mode == "relay":
                self.relay.check(body.sampling)
            else:
                await asyncio.to_thread(endpoint_policy, body, needs_tokens=needs_tokens)
            if body.needs_tokenizer:
                await self.relay.templates.of(body.tokenizer or body.model)

    def add(self, slot: Slot, rollout: Rollout) -> None:
        """Registers an attempt, so that `for_episode` finds the rollout whose endpoint receives its calls."""
        self._rollouts[slot] = rollout, _key_of(rollout.policy, rollout.submission.body.needs_tokens)

    async def remove(self, slot: Slot) -> None:
        """Removes an attempt that has ended. Closes the connections to its endpoint if no other attempt uses it."""
        _, key = self._rollouts.pop(slot, (None, ""))
        if key in self._shared and all(key != other for _, other in self._rollouts.values()):
            await self._shared.pop(key).close()

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """Returns the LLM client of an episode, which sends calls to the endpoint of its rollout.

        Raises:
            PolicyError: No rollout has this attempt, or its policy cannot be created.
        """
        slot = episode.task_name, episode.attempt
        if slot not in self._rollouts:
            raise PolicyError(f"No submitted rollout is attempt {episode.attempt} at the task {episode.task_name}.")
        rollout, key = self._rollouts[slot]
        body = rollout.policy
        may_ask = episode.may_ask
        episode = replace(
            episode,
            headers={name: text.replace("{rollout_id}", rollout.rollout_id) for name, text in body.headers.items()},
            may_ask=partial(self._uncounted, may_ask),
            version=lambda: self.version,
        )
        if body.mode == "relay":
            model = body.tokenizer or body.model
            client = self.relay.policy_for(rollout.rollout_id, model, body.sampling, episode)
        else:
            client = self._policy(body, key, rollout.submission.body.needs_tokens).for_episode(episode)
        return _Counted(self, rollout, client, may_ask)

    def count(self, change: int) -> None:
        """Adds `change` to the number of calls in flight."""
        self.in_flight += change
        if self.in_flight:
            self.drained.clear()
        else:
            self.drained.set()

    async def close(self) -> None:
        """Closes all endpoints. Idempotent."""
        while self._shared:
            _, policy = self._shared.popitem()
            await policy.close()

    def _policy(self, body: PolicyBody, key: str, needs_tokens: bool) -> EndpointPolicy:
        if key not in self._shared:
            try:
                policy = endpoint_policy(body, needs_tokens=needs_tokens)
            except Exception as error:  # for example, the key was removed from the environment
                raise PolicyError(str(error)) from None
            if isinstance(policy, TokenEndpointPolicy):
                policy.templates = self.relay.templates
            self._shared[key] = policy
        return self._shared[key]

    async def _uncounted(self, may_ask: Callable[[], Awaitable[None]]) -> None:
        """Waits until a call is allowed. The waiting call does not count as in flight."""
        self.count(-1)
        try:
            await may_ask()
        finally:
            self.count(1)


@dataclass(eq=False, slots=True)
class _Counted:
    """A client that counts the calls of a rollout, and repeats calls that the engine aborted (`on_abort: resample`)."""

    policies: RolloutPolicies
    rollout: Rollout
    client: LLMClient
    may_ask: Callable[[], Awaitable[None]]

    @property
    def max_concurrency_per_episode(self) -> int:
        return concurrency_of(self.client)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        policy = self.rollout.policy
        tries = MAX_ABORTED if policy.mode != "relay" and policy.on_abort == "resample" else 1
        for number in range(tries):
            if number:
                await self.may_ask()  # an engine that aborts calls usually loads weights
            self.policies.count(1)
            try:
                response = await self.client(request)
            finally:
                self.policies.count(-1)
            if response.finish_reason != ABORT:
                self.rollout.calls += 1
                return response
        raise EndpointError("The engine aborted the call.", code=ABORT, retryable=True)

    def advance(self, request: LLMRequest, response: LLMResponse | None) -> None:
        self.rollout.calls += 1
        if has_members(self.client, AdvancingClient):
            self.client.advance(request, response)


def _key_of(body: PolicyBody, needs_tokens: bool) -> str:
    """Returns a digest of a policy without its headers. Policies with equal digests can share connections."""
    whole = json.dumps([body.model_dump(exclude={"headers"}), needs_tokens], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()  # a hash, because tracebacks must not show the API key


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
