"""The policy of a service: it sends the LLM calls of each rollout to the endpoint of the rollout's trainer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ares_exp.config.parts import has_members
from ares_exp.errors import ConfigError, EndpointError, PolicyError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.anthropic import AnthropicPolicy
from ares_exp.policies.asked_ahead import concurrency_of
from ares_exp.policies.chat_completions import OpenAIPolicy
from ares_exp.policies.endpoint_policy import OWN_SAMPLING, EndpointPolicy
from ares_exp.policies.in_process.token_client import ABORT, MAX_ABORTED
from ares_exp.policies.policy import AdvancingClient, EpisodeSpec, Policy
from ares_exp.policies.responses import OpenAIResponsesPolicy
from ares_exp.policies.token_endpoint import SglangPolicy, TokenEndpointPolicy, VllmPolicy
from ares_exp.records.secrets import protect
from ares_exp.records.validation import explain_validation
from ares_exp.runs.scheduler import Slot
from ares_exp.training.service.bodies import PolicyBody
from ares_exp.training.service.token_relay import Relay

if TYPE_CHECKING:
    from ares_exp.training.service.served_rollouts import Rollout

ENV = "env:"
FIELDS = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "stop": "stop_sequences"}
"""Maps names of sampling parameters in a submission to names of policy arguments, where the two names differ."""


def endpoint_policy(body: PolicyBody, *, needs_tokens: bool) -> EndpointPolicy:
    """Creates the policy for the endpoint of a submission. Checks its settings, without connecting to the endpoint.

    Raises:
        UserError: A setting is missing or invalid.
    """
    if body.base_url is None:
        raise ConfigError('Expected `policy.base_url` with `mode: "endpoint"`, got none. Set the URL of the endpoint.')
    continues = body.on_abort == "continue"
    if continues and body.wire not in ("ids", "sglang"):
        raise ConfigError(
            f'Expected `policy.wire` "ids" or "sglang" with `on_abort: "continue"`, got "{body.wire}". Set '
            'the wire, or use `on_abort: "resample"`.'
        )
    named = {FIELDS.get(name, name): value for name, value in body.sampling.items()}
    own = {name: named.pop(name) for name in OWN_SAMPLING if name in named}
    kind: type[EndpointPolicy] = OpenAIPolicy
    key, more = body.key or "", dict[str, Any]()
    match body.wire:
        case "chat" if needs_tokens:
            kind = VllmPolicy
        case "responses":
            kind = OpenAIResponsesPolicy
        case "messages":
            kind = AnthropicPolicy
        case "ids" | "sglang":
            kind = VllmPolicy if body.wire == "ids" else SglangPolicy
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
