"""The results of episodes, with their outcomes, errors and usage."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from ares_exp.errors import (
    AgentError,
    AgentExitError,
    BudgetExhaustedError,
    ContainerError,
    HostLostError,
    PolicyError,
    StorageError,
    UnreachableError,
    VerifierError,
)
from ares_exp.llms.response import LLMResponse
from ares_exp.records.validation import Text, validated

_OF_AN_ATTEMPT = re.compile(r"(.+__\d+)__\w+")
"""Pattern of an episode's id: the task, the attempt, and a suffix that is unique among the episodes of the attempt."""


@dataclass(slots=True)
class EpisodeUsage:
    """Totals over the steps of an episode so far.

    Attributes:
        num_steps: Number of responses.
        unanswered: Number of steps without a response, because the time limit was reached.
        prompt_tokens, generated_tokens: Total tokens of the responses.
        cost: Total cost of the responses, in US dollars.
        length_stops: Number of responses that were cut off at the limit on generated tokens.
    """

    num_steps: int = 0
    unanswered: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    length_stops: int = 0

    @property
    def step_count(self) -> int:
        """The number of time steps after FIRST."""
        return self.num_steps + self.unanswered

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens

    def add(self, action: LLMResponse | object | None) -> None:
        """Counts one step and its response, if any. The cost of an action that is not an `LLMResponse` is unknown."""
        if action is None:
            self.unanswered += 1
            return
        self.num_steps += 1
        if isinstance(action, LLMResponse):
            self.pay(action)

    def pay(self, response: LLMResponse) -> None:
        """Counts the tokens and cost of a response, even if the episode does not receive it."""
        self.prompt_tokens += response.usage.prompt_tokens
        self.generated_tokens += response.usage.generated_tokens
        self.cost += response.cost
        self.length_stops += response.finish_reason == "length"


class Outcome(StrEnum):
    """The outcome of an episode."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABANDONED = "abandoned"
    CLOSED = "closed"
    CANCELLED = "cancelled"
    AGENT_ERROR = "agent_error"
    CONTAINER_ERROR = "container_error"
    VERIFIER_ERROR = "verifier_error"
    POLICY_ERROR = "policy_error"
    ERRORED = "errored"
    LOST = "lost"

    @classmethod
    def of(cls, error: BaseException) -> Outcome:
        """Returns the outcome of an episode that ended with `error`."""
        cancelled = asyncio.CancelledError, KeyboardInterrupt, BudgetExhaustedError, StorageError, UnreachableError
        if isinstance(error, cancelled):
            return cls.CANCELLED
        classes: tuple[tuple[type[BaseException], Outcome], ...] = (
            (AgentError, cls.AGENT_ERROR),
            (HostLostError, cls.LOST),
            (ContainerError, cls.CONTAINER_ERROR),
            (VerifierError, cls.VERIFIER_ERROR),
            (PolicyError, cls.POLICY_ERROR),
        )
        return next((outcome for kind, outcome in classes if isinstance(error, kind)), cls.ERRORED)


UNFINISHED = frozenset({Outcome.CANCELLED, Outcome.LOST, Outcome.ABANDONED, Outcome.CLOSED})
"""Outcomes of interrupted episodes, which are not a result of the attempt."""

RESPONSES_USED_UP = frozenset({Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.ABANDONED})
"""Outcomes after which the response log can be deleted: the attempt has a result, or starts from the beginning."""


HOST_IMAGE = "host"
"""Value of `container_image` for a container that uses the files of this host."""

MAX_MESSAGE = 20_000
"""Maximum length of an error message, in characters, so that every row is small enough to be read back."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error, or the limit that truncated an episode.

    Attributes:
        type: Class name of the exception; `limit` for a limit. For the limit `agent_exit`, the class name of its
            exception.
        message: Human-readable message.
        limit: Limit that was reached: `steps`, `time`, `tokens`, `cost`, `unknown`, or a name that the environment
            defines; `None` for an error.
    """

    type: Text
    message: Text
    limit: Text | None = None

    @classmethod
    def of_limit(cls, limit: str | None, note: str | None = None) -> Self:
        """Creates the record of a limit, with an optional note. `None` means that the limit is unknown."""
        name = limit or "unknown"
        if name == "agent_exit" and note:
            return cls(AgentExitError.__name__, _bounded(note), name)
        return cls("limit", _bounded(f"limit reached: {name}{f': {note}' if note else ''}"), name)

    def to_dict(self) -> dict[str, str]:
        """Returns the JSON-ready form. Omits `limit` if it is `None`."""
        more = {} if self.limit is None else {"limit": self.limit}
        return {"type": self.type, "message": self.message, **more}

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Creates the record of an exception."""
        return cls(type(error).__name__, _bounded(str(error) or type(error).__name__))


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}… ({len(text):,} characters)"


@dataclass(frozen=True, slots=True)
class Replayed:
    """Recorded responses from an earlier episode that were replayed instead of being requested from the policy.

    Attributes:
        episode_id: Id of the earlier episode, of the same attempt.
        steps: Number of replayed responses, including the responses before a restored snapshot.
        prompt_tokens, generated_tokens, cost: Sums over the replayed responses, which are also in the totals of the
            earlier episode.
        from_snapshot: Step at which a snapshot was restored; `None` if the episode was run again from the start.
        diverged_at: First step whose request differs from the recorded request; `None` if all requests are equal.
    """

    episode_id: str
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    from_snapshot: int | None = None
    diverged_at: int | None = None

    @classmethod
    def of(cls, episode_id: str, responses: Sequence[LLMResponse]) -> Self:
        """Creates the record for these responses from an earlier episode."""
        return cls(
            episode_id,
            len(responses),
            prompt_tokens=sum(response.usage.prompt_tokens for response in responses),
            generated_tokens=sum(response.usage.generated_tokens for response in responses),
            cost=sum(response.cost for response in responses),
        )


@dataclass(frozen=True, slots=True)
class EnvironmentUsage:
    """Usage of an environment's own model calls, such as the oracle's calls in twenty questions.

    Attributes:
        prompt_tokens, generated_tokens: Total tokens, as counted by the engines.
        cost: Total cost in US dollars.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0

    def __add__(self, other: EnvironmentUsage) -> EnvironmentUsage:
        return EnvironmentUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.generated_tokens + other.generated_tokens,
            self.cost + other.cost,
        )

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """Facts about an installed agent and its requests in one episode.

    Attributes:
        name: Name of the agent.
        version: Pinned version of the agent. For `agent=command`, the digest of the files in the container. `None` if
            no version is pinned.
        requests: Number of HTTP requests for a response, including retries.
        retries: Number of requests that asked for the same response again. They cause no further cost.
        conversations: Names of the agent's conversations, in the order in which they started.
        dropped: Unsupported fields that were removed from the requests.
        background_requests: Number of background requests, such as for titles, that the policy answered without a step.
        refused: Number of HTTP requests that the LLM endpoint rejected, such as a request with a wrong key.
        last_refusal: Method, path, status and reason of the last rejected request; `None` if there is none.
    """

    name: str
    version: str | None = None
    requests: int = 0
    retries: int = 0
    conversations: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    background_requests: int = 0
    refused: int = 0
    last_refusal: str | None = None

    def __add__(self, other: AgentFacts) -> AgentFacts:
        return AgentFacts(
            self.name,
            self.version,
            self.requests + other.requests,
            self.retries + other.retries,
            tuple(dict.fromkeys((*self.conversations, *other.conversations))),
            tuple(sorted({*self.dropped, *other.dropped})),
            self.background_requests + other.background_requests,
            self.refused + other.refused,
            other.last_refusal or self.last_refusal,
        )


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of one stage of a multi-step task.

    Attributes:
        name: Name of the stage.
        reward: Reward of the stage; `None` if the stage was not verified.
        rewards: All scores of the stage's verifier, by key.
        truncated_by: Limit that ended the stage; `None` if no limit was reached.
        num_steps: Number of responses in the stage, plus one if the final response did not arrive in time.
    """

    name: str
    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    truncated_by: str | None = None
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One line of `episodes.jsonl`: the result of one episode.

    An attempt gets another episode after an error (`retry`), or when the run is resumed. Every episode keeps its line,
    and the last episode is the result of the attempt.

    Attributes:
        episode_id: Unique id of the episode, which is also the name of its trajectory file.
        task_name: Name of the task.
        attempt: Number of the attempt at the task, from 0.
        seed: Seed of this episode.
        outcome: Outcome of the episode.
        reward: Reward of the episode: the verifier's reward, or its weighted sum with the scorers' rewards. `None` if
            the episode has no reward, which is never recorded as 0.0.
        rewards: All scores of the verifier, by key, and of the scorers, by name.
        note: Explanation of a reward for tests that could not be run or graded, or of a missing reward after a limit.
        error: Error of the episode, or the limit that truncated it.
        num_steps: Number of steps after the first request: responses, and responses that did not arrive in time. The
            `num_steps` of the trajectory also counts the record of the first request.
        prompt_tokens, generated_tokens: Total tokens of the policy in the episode.
        cost: Total cost of the policy in the episode, in US dollars.
        length_stops: Number of responses that were cut off at the token limit (`finish_reason` is `length`).
        format_errors: Number of responses that the agent could not use, if the agent counts them, as `agent=shell`
            does.
        started_at, finished_at: Times in epoch seconds, from the creation of the environment to the verdict. They equal
            `start_time` and `end_time` of the trajectory.
        phase_sec: Wall-clock seconds by phase: `start`, `agent`, `policy`, `verify`, `score` and `snapshot` (the wait
            for snapshots after a response).
        container_image: Origin of the container's files: the name of an image, or `HOST_IMAGE`. `None` if the container
            never started.
        snapshots: Number of stored snapshots of the episode.
        snapshot_failures: Number of snapshots that could not be taken or deleted.
        retry: Number of earlier episodes of this attempt.
        replayed: Responses that were replayed from an earlier episode; `None` if no responses were replayed.
        stages: Results of the stages; empty for a single-stage task.
        environment_usage: Usage of the environment's model calls in this episode, in addition to the policy's usage.
            `None` if the environment makes no model calls. Responses taken over from an earlier episode count only in
            that episode.
        agent: Facts about an installed agent; `None` for other agents.
    """

    episode_id: str
    task_name: str
    attempt: int
    seed: int
    outcome: Outcome
    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    error: ErrorInfo | None = None
    num_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    started_at: float = 0.0
    finished_at: float = 0.0
    phase_sec: Mapping[str, float] = field(default_factory=dict)
    container_image: str | None = None
    snapshots: int = 0
    snapshot_failures: int = 0
    retry: int = 0
    replayed: Replayed | None = None
    stages: tuple[StageResult, ...] = ()
    environment_usage: EnvironmentUsage | None = None
    length_stops: int = 0
    format_errors: int = 0
    note: str | None = None
    agent: AgentFacts | None = None

    @property
    def limit(self) -> str | None:
        """The limit that truncated the episode; `None` if no limit was reached."""
        return self.error.limit if self.error is not None else None

    @property
    def duration_sec(self) -> float:
        """The duration in wall-clock seconds."""
        return self.finished_at - self.started_at

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form."""
        data = {name: getattr(self, name) for name in _FIELDS}
        return data | {
            "rewards": dict(self.rewards),
            "error": self.error.to_dict() if self.error is not None else None,
            "phase_sec": dict(self.phase_sec),
            "replayed": asdict(self.replayed) if self.replayed is not None else None,
            "stages": tuple(map(asdict, self.stages)),
            "environment_usage": asdict(self.environment_usage) if self.environment_usage is not None else None,
            "agent": asdict(self.agent) if self.agent is not None else None,
        }

    def to_row(self) -> dict[str, Any]:
        """Returns one row of a table, with plain values.

        Mappings become columns named `name.key`. The stages remain a list.
        """
        row: dict[str, Any] = {}
        for name, value in self.to_dict().items():
            if name == "error":
                error = value or {}
                row |= {"error_type": error.get("type"), "error_message": error.get("message"), "limit": self.limit}
            elif isinstance(value, Mapping):
                row |= {f"{name}.{key}": one for key, one in value.items()}
            elif name not in _MAPPINGS:
                row[name] = list(value) if name == "stages" else value
        return {**row, "outcome": self.outcome.value, "duration_sec": self.duration_sec}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Creates a result from its `to_dict` form. Ignores fields that this version does not know.

        Raises:
            ValueError: `data` is not a valid result. The message explains why.
        """
        return validated(cls, data)


_FIELDS = tuple(field.name for field in fields(EpisodeResult))
_MAPPINGS = frozenset({"rewards", "phase_sec", "replayed", "environment_usage", "agent"})
"""Fields of a row that are mappings or `None`. Each of their keys becomes a column."""


def attempt_of(episode_id: str) -> str:
    """Returns the common start of the ids of an attempt's episodes: the id without its unique suffix."""
    found = _OF_AN_ATTEMPT.fullmatch(episode_id)
    return found[1] if found else episode_id


def final_results(results: Iterable[EpisodeResult]) -> tuple[EpisodeResult, ...]:
    """Returns the last episode of every attempt, in the order in which the attempts first appear."""
    last: dict[tuple[str, int], EpisodeResult] = {}
    for result in results:
        slot = result.task_name, result.attempt
        if slot not in last or result.retry >= last[slot].retry:
            last[slot] = result
    return tuple(last.values())


def reward_names(results: Iterable[EpisodeResult]) -> list[str]:
    """Returns the names of all rewards, in order of first appearance.

    Omits the name `reward` if its value equals the episode's reward in every result.
    """
    given = [(name, value != result.reward) for result in results for name, value in result.rewards.items()]
    names = dict.fromkeys(name for name, _ in given)
    return [name for name in names if name != "reward" or ("reward", True) in given]


def count_outcomes(results: Iterable[EpisodeResult]) -> dict[str, int]:
    """Counts episodes by outcome. Omits outcomes that did not occur."""
    return dict(Counter(result.outcome.value for result in results))
