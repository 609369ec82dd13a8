"""The `Policy` protocol: an `LLMClient` that the runner opens, binds to episodes, and closes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO, cast

from ares_exp.errors import ConfigError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Which episode is played.

    Attributes:
        task_name: Name of the task.
        attempt: Number of this playing of the task, from 0.
        seed: Seed of this episode, derived from the run's seed, the task's name, the attempt and the try.
        retry: How many tries of the attempt came before.
        on_wait: Is to be told of the seconds that a request waits for something else than its answer (before a retry,
            for a place): before they pass where that is known, so that no time limit of the episode runs out meanwhile.
    """

    task_name: str
    attempt: int = 0
    seed: int = 0
    retry: int = 0
    on_wait: Callable[[float], None] | None = field(default=None, compare=False, repr=False)


class RunReport(Protocol):
    """What a policy has to say of a whole run."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        ...

    def render(self, stream: TextIO) -> None:
        """Writes it for people."""
        ...


class Policy(LLMClient, Protocol):
    """Answers the requests of many episodes, concurrently. A plain `LLMClient` can be used in its place.

    A policy that plays recorded episodes may also have `seed_of(task_name, attempt) -> int | None`, the seed that an
    episode is to be played with, and `report(results) -> RunReport`, asked for when all `EpisodeResult`s are there.
    What `for_episode` gives may also have `advance(request, answer)`, if it keeps a place of its own: when an episode
    is resumed, it is told in order of every request that is answered in its stead, and moves on as if it had answered
    it. It raises nothing.

    Attributes:
        needs_solution: Whether the environment must put the task's solution into the container (the oracle).
    """

    needs_solution: bool

    async def preflight(self) -> None:
        """Checks, before anything starts, that requests can be answered.

        Raises:
            PreflightError: With the remedy.
        """
        ...

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """What answers the requests of one episode; `self` for a policy that has nothing to keep apart.

        Raises:
            PolicyError: This policy has nothing for that episode.
        """
        ...

    async def close(self) -> None:
        """Releases connections. Idempotent."""
        ...


def as_policy(client: Policy | LLMClient) -> Policy:
    """`client` itself if it is a policy; a plain `LLMClient`, of which nothing can be asked but answers, made one.

    Raises:
        ConfigError: It is neither.
    """
    if not callable(client):
        raise ConfigError(f"Expected the policy to be callable with an LLMRequest, got {type(client).__name__}.")
    if all(hasattr(client, name) for name in ("preflight", "for_episode", "close", "needs_solution")):
        return cast("Policy", client)
    return _PlainPolicy(client)


class SharedPolicy:
    """The parts of `Policy` that a policy without state per episode need not write again."""

    needs_solution = False

    async def preflight(self) -> None:
        """Nothing to check."""

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        """The policy itself."""
        return self

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Answers one request."""
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing to release."""


class _PlainPolicy(SharedPolicy):
    def __init__(self, client: LLMClient) -> None:
        self._client = client

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        return await self._client(request)
