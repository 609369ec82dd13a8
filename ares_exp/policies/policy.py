"""The contract of a policy: an `LLMClient` that the runner opens, binds to episodes, and closes."""

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
from ares_exp.records.recorded_results import MAX_COUNT, MAX_NUMBER, is_countable
from ares_exp.records.results import EpisodeResult

if TYPE_CHECKING:
    from ares_exp.policies.replay_report import ReplayReport


Check = Callable[[], Awaitable[None]]
"""Raises `UnreachableError` while a service cannot be reached."""


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Which episode is run.

    Attributes:
        task_name: Name of the task.
        attempt: Number of this running of the task, from 0.
        seed: Seed of this episode, derived from the run's seed, the task's name, the attempt and the try.
        retry: How many tries of the attempt came before.
        on_wait: Is to be told of the seconds that a request waits for something else than its response (before a retry,
            for a place): before they pass where that is known, so that no time limit of the episode runs out meanwhile.
        may_ask: Is to be awaited before each try of a request, by a policy that tries several times: while the run is
            held (`ares-exp ctl RUN pause --now`) it does not return.
        until_reachable: Is to be awaited when no connection could be made, with the error and a check of the endpoint.
            No episode starts until the check passes. Returns whether it failed first. `None`: there is no such wait.
        normalisers: What of the agent's requests differs whenever it is run again: name → pattern and replacement.
        earlier: Responses that a branch has from the episode that it branches off, in order.
    """

    task_name: str
    attempt: int = 0
    seed: int = 0
    retry: int = 0
    on_wait: Callable[[float], None] | None = field(default=None, compare=False, repr=False)
    may_ask: Callable[[], Awaitable[None]] | None = field(default=None, compare=False, repr=False)
    until_reachable: Callable[[PolicyError, Check], Awaitable[bool]] | None = field(
        default=None, compare=False, repr=False
    )
    normalisers: Mapping[str, tuple[str, str]] = field(default_factory=dict, compare=False, repr=False)
    earlier: Sequence[LLMResponse] = field(default=(), compare=False, repr=False)


class Policy(LLMClient):
    """Answers the requests of many episodes, concurrently: everything that is asked of a policy.

    Only `__call__` is needed: a plain `LLMClient` can be used in its place. The rest has its default here.

    Attributes:
        needs_solution: Whether the environment must put the task's solution into the container (the oracle); known
            after `preflight`.
        model_name: Name of the model that responses, for the records; `None` where it is not known, or differs.
        unpriced: Names of models that have answered and whose price is not known: their cost counts as 0.0.
        recorded_tasks: The only tasks that it has responses for, of a policy that runs recorded episodes; known after
            `preflight`. `None`: any.
        knows_prices: Whether it was told what its responses cost, so that limits on cost can be set.
        must_pass: Whether an attempt below the reward threshold means that something is broken, not that the policy is
            weak (the oracle): the command then fails.
    """

    needs_solution: bool = False
    model_name: str | None = None
    unpriced: Collection[str] = ()
    recorded_tasks: Collection[str] | None = None
    knows_prices: bool = False
    must_pass: bool = False

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Answers one request."""
        raise NotImplementedError

    async def preflight(self) -> None:
        """Checks, before anything starts, that requests can be answered.

        Raises:
            PreflightError: With the remedy.
        """

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """Returns what answers the requests of one episode. Default: the policy, which keeps no episodes apart.

        Raises:
            PolicyError: This policy has nothing for that episode.
        """
        return self

    def seed_of(self, task_name: str, attempt: int) -> int | None:
        """Returns the seed that an episode must be run with, of a policy that runs recorded ones. Default: any."""
        return None

    def recorded_files(self, task_name: str, attempt: int) -> Path | None:
        """Returns the directory of the files of the recorded episode that an attempt runs again. Default: `None`.

        The grades of judges in it are given again, where a judge asks the same.
        """
        return None

    def report(self, results: Sequence[EpisodeResult]) -> ReplayReport | None:
        """Returns what the policy has to say of the whole run, when it is over. Default: nothing."""
        return None

    def adjust(self, name: str, value: Any) -> Callable[[], None]:
        """Returns what changes a setting of the policy while the run goes on; it raises nothing. Default: nothing can.

        Raises:
            ConfigError: This one cannot change, or not to that value.
        """
        raise ConfigError(f"`policy.{name}` of this policy cannot change while the run goes on. Set it with `resume=`.")

    async def close(self) -> None:
        """Releases connections. Idempotent."""


@runtime_checkable
class AdvancingClient(LLMClient, Protocol):
    """A client of one episode, from `Policy.for_episode`, that has a position (in a script, in a recording)."""

    def advance(self, request: LLMRequest, response: LLMResponse | None) -> None:
        """Goes past a request that was answered in the client's stead, as if it had answered it. Raises nothing.

        Called in order when an episode is resumed.

        Args:
            request: What was asked.
            response: What was answered; `None`: there was no response in time.
        """
        ...


Weights = Mapping[str, Any] | Path | Callable[[], None]
"""New weights: tensors by parameter name (others stay), a directory of a saved model, or what changes them in place."""


@runtime_checkable
class UpdatablePolicy(Protocol):
    """A policy whose weights a trainer changes while episodes go on.

    Every response is of one version, which its `LLMResponse.policy_version` says: no token of a response is sampled
    from other weights than the rest of it.

    Attributes:
        policy_version: Of the weights that response now; `None` where nobody gave them one.
    """

    policy_version: str | None

    async def update(self, version: str, weights: Weights | None = None) -> None:
        """Takes new weights, and returns when requests that come from now on are answered by them.

        Answers in progress are finished with the weights that they started with; requests that wait are answered by the
        new ones. Updates are taken one after the other, in the order of the calls.

        Args:
            version: Name of the new weights, in responses from now on.
            weights: The weights. `None`: they are in place already, and no response was running when they came there
                (a trainer that owns the module has stepped between two rollouts; an engine was sent them by its own
                way).

        Raises:
            ConfigError: This policy cannot take weights in that form; those before stay.
            PolicyError: They could not be taken.
        """
        ...


def as_policy(client: LLMClient) -> Policy:
    """Returns `client` with the defaults of `Policy` for what it lacks.

    Raises:
        ConfigError: It is neither a policy nor a plain `LLMClient`.
    """
    if not callable(client):
        raise ConfigError(f"Expected the policy to be callable with an LLMRequest, got {type(client).__name__}.")
    return completed(client, Policy)


async def checked_response(client: LLMClient, request: LLMRequest) -> LLMResponse:
    """Asks a client and checks its response.

    Raises:
        PolicyError: The client is not asynchronous, or its response is not an `LLMResponse`.
        MalformedResponseError: The cost or the usage of the response cannot be counted.
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
            f"Expected the policy to answer with an LLMResponse, got {type(response).__name__}. Make it from a text by "
            "LLMResponse.from_text(text)."
        )
    if not isinstance(response.data, tuple) or not all(map(is_dataclass, response.data)):
        raise PolicyError(
            "Expected the `data` of the policy's LLMResponse to be a list of pieces such as TextData(text), got "
            f"{response.data!r:.80}. Of a text it is made by LLMResponse.from_text(text)."
        )
    if not is_countable(response):
        raise MalformedResponseError(
            f"Expected the policy's response to cost 0 or more US dollars, below {MAX_NUMBER:g}, and to have used "
            f"0 or more tokens, below {MAX_COUNT:,}, got cost={response.cost!r:.80}, usage={response.usage!r:.200}."
        )
    return response
