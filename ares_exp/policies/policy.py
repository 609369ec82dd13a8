"""The contract of a policy: the part of a run that responds to the LLM requests of agents.

The runner checks a policy before the run, requests a client for each episode, and closes the policy after the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ares_exp.config.parts import completed, name_of
from ares_exp.errors import ConfigError, MalformedResponseError, PolicyError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.waiting import OnWait, at_once, nobody_waits
from ares_exp.records.recorded_results import is_countable
from ares_exp.records.results import EpisodeResult
from ares_exp.records.validation import MAX_COUNT, MAX_NUMBER

if TYPE_CHECKING:
    from ares_exp.policies.replay import ReplayReport


Check = Callable[[], Awaitable[None]]
"""Function that raises `UnreachableError` while a service cannot be reached."""


def unknown_version() -> None:
    """Returns `None`. Default of the hook `EpisodeSpec.version`."""


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """The identity of an episode, and the functions with which the run controls the policy's requests for it.

    Attributes:
        task_name: Name of the task.
        attempt: Number of the attempt at the task, starting at 0.
        seed: Seed of the episode, derived from the run's seed, the task's name, the attempt and the retry.
        retry: Number of earlier episodes of the attempt.
        on_wait: Callback that receives the seconds for which a request waits for anything except its response (a retry,
            a slot). It extends the time limits of the episode, and is called before a wait whose length is known.
        may_ask: Function that a policy with retries awaits before each attempt to send a request. It does not return
            while the run is paused (`ares-exp ctl RUN pause --now`).
        until_reachable: Function that the policy awaits after a failed connection. Its arguments are the error and a
            function that checks the endpoint. It waits until the check passes, and no episode starts meanwhile. It
            returns `False` if the first check passed, so that there was no outage. `None` disables this wait.
        normalisers: Patterns for the parts of the agent's requests that differ in every run, so that a replay can
            ignore them: name → (pattern, replacement).
        earlier: Responses of a branch's parent episode before the branching point, in order; empty without a parent.
        headers: HTTP headers to add to each request to an endpoint.
        version: Function that returns the current version of the weights, or `None` if it is unknown. The version is
            recorded in responses that contain no version.
    """

    task_name: str
    attempt: int = 0
    seed: int = 0
    retry: int = 0
    on_wait: OnWait = field(default=nobody_waits, compare=False, repr=False)
    may_ask: Callable[[], Awaitable[None]] = field(default=at_once, compare=False, repr=False)
    until_reachable: Callable[[PolicyError, Check], Awaitable[bool]] | None = field(
        default=None, compare=False, repr=False
    )
    normalisers: Mapping[str, tuple[str, str]] = field(default_factory=dict, compare=False, repr=False)
    earlier: Sequence[LLMResponse] = field(default=(), compare=False, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    version: Callable[[], str | None] = field(default=unknown_version, compare=False, repr=False)


class Policy(LLMClient):
    """Responds to the requests of many concurrent episodes. This class is the complete interface of a policy.

    Only `__call__` is required, so that a plain `LLMClient` can be used as a policy. All other members have defaults.

    Attributes:
        needs_solution: Whether the environment has to copy the task's solution into the container, because the policy
            runs it. Known after `preflight`.
        model_name: Name of the model for the records; `None` if it is unknown or varies.
        unpriced: Names of models that have responded without a known price. Their responses count as costing 0.0.
        recorded_tasks: Names of the tasks for which the policy has recorded responses. Known after `preflight`. `None`
            for a policy that responds for every task.
        knows_prices: Whether the prices of responses are configured, so that cost limits can be set.
        must_pass: Whether the policy should solve every task, as the oracle should. If the reward of an attempt is
            below the threshold, the task or the package has a defect, and the command of the run fails.
    """

    needs_solution: bool = False
    model_name: str | None = None
    unpriced: Collection[str] = ()
    recorded_tasks: Collection[str] | None = None
    knows_prices: bool = False
    must_pass: bool = False

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Responds to one request."""
        raise NotImplementedError

    async def preflight(self) -> None:
        """Checks that the policy can respond to requests. Called before any container or episode starts.

        Raises:
            PreflightError: The policy cannot respond. The message suggests a fix.
        """

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """Returns a client for the requests of one episode.

        Default: the policy itself, so that all episodes share one client.

        Raises:
            PolicyError: The policy has no responses for this episode.
        """
        return self

    def seed_of(self, task_name: str, attempt: int) -> int | None:
        """Returns the seed of the recorded episode that an attempt replays; `None` (default) lets the run choose."""
        return None

    def recorded_files(self, task_name: str, attempt: int) -> Path | None:
        """Returns the directory with the files of the recorded episode that an attempt replays. Default: `None`.

        If a judge (a scorer that uses a model) repeats a recorded request, these files contain the recorded response.
        """
        return None

    def report(self, results: Sequence[EpisodeResult]) -> ReplayReport | None:
        """Returns the policy's own report on a run that has ended, or `None` if it has no report (default)."""
        return None

    def adjust(self, name: str, value: Any) -> Callable[[], None]:
        """Checks a new value for a setting, and returns a function that applies it while the run continues.

        The returned function never raises an exception. Default: no setting can be changed.

        Raises:
            ConfigError: The setting cannot be changed, or the value is not allowed.
        """
        raise ConfigError(f"`policy.{name}` of this policy cannot change during the run. Set it when you resume.")

    async def close(self) -> None:
        """Releases connections. Idempotent."""


@runtime_checkable
class AdvancingClient(LLMClient, Protocol):
    """A client whose next response depends on the episode's earlier requests, for example by a position in a script."""

    def advance(self, request: LLMRequest, response: LLMResponse | None) -> None:
        """Notes a request whose response came from another source, such as a log. Never raises an exception.

        When an episode is resumed, this method is called for each earlier request, in order. The client then continues
        after the last of these requests.

        Args:
            request: Request to which this client need not respond.
            response: Response to the request; `None` if it did not arrive in time.
        """
        ...


Weights = Mapping[str, Any] | Path | Callable[[], None]
"""New weights: a mapping from parameter names to tensors, a model directory, or a function that changes the model.

The mapping need not contain all parameters.
"""


@runtime_checkable
class UpdatablePolicy(Protocol):
    """A policy whose weights a trainer changes while episodes run.

    All tokens of a response are sampled from the same weights, whose version is `LLMResponse.policy_version`.

    Attributes:
        policy_version: Version of the current weights; `None` if no version was set.
    """

    policy_version: str | None

    async def update(self, version: str, weights: Weights | None = None) -> None:
        """Updates the weights. Returns when new requests use the new weights.

        Responses that are being generated are finished with the old weights. Requests that wait use the new weights.
        Updates are applied one after the other, in the order of the calls.

        Args:
            version: Name of the new weights, recorded in responses from now on.
            weights: New weights. `None` if the engine already uses them, for example because it received them
                separately. The caller must then ensure that no response was generated during the change of weights.

        Raises:
            ConfigError: The policy does not support weights in this form. It continues to use the old weights.
            PolicyError: The update failed.
        """
        ...


def as_policy(client: LLMClient) -> Policy:
    """Returns `client` as a complete policy. Members of `Policy` that `client` does not have get their defaults.

    Raises:
        ConfigError: `client` is neither a policy nor a plain `LLMClient`.
    """
    if not callable(client):
        raise ConfigError(f"Expected the policy to be callable with an LLMRequest, got {type(client).__name__}.")
    return completed(client, Policy)


async def checked_response(client: LLMClient, request: LLMRequest) -> LLMResponse:
    """Sends a request to a client and checks its response.

    Raises:
        PolicyError: The client is not asynchronous, or its response is not an `LLMResponse`.
        MalformedResponseError: The cost or the usage of the response is not a valid number.
    """
    responding = client(request)
    if not inspect.isawaitable(responding):
        raise PolicyError(
            f"Expected the policy `{name_of(client)}` to be asynchronous, got {type(responding).__name__}, which "
            "cannot be awaited. Define its call with `async def`."
        )
    response: object = await responding
    if not isinstance(response, LLMResponse):
        raise PolicyError(
            f"Expected the policy to return an LLMResponse, got {type(response).__name__}. To convert a text, "
            "use LLMResponse.from_text(text)."
        )
    if not isinstance(response.data, tuple) or not all(map(is_dataclass, response.data)):
        raise PolicyError(
            "Expected the `data` of the policy's LLMResponse to be a list of pieces such as TextData(text), got "
            f"{response.data!r:.80}. To create one from a text, use LLMResponse.from_text(text)."
        )
    if not is_countable(response):
        raise MalformedResponseError(
            f"Expected the policy's response to have a cost from 0 to below {MAX_NUMBER:g} US dollars, and "
            f"token counts from 0 to below {MAX_COUNT:,}, got cost={response.cost!r:.80}, "
            f"usage={response.usage!r:.200}."
        )
    return response
