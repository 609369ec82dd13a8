"""Results: how one episode ended, and what a run adds up to."""

from __future__ import annotations

import asyncio
import re
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
"""The id of an episode: its task, its attempt, and what other episodes of the attempt do not have."""


@dataclass(slots=True)
class EpisodeUsage:
    """Totals over the steps of an episode, so far.

    Attributes:
        num_steps: Responses that were given.
        unanswered: Steps without a response, because the time was up before.
        prompt_tokens, generated_tokens: Of the responses.
        cost: Of the responses, in US dollars.
        length_stops: Responses that ended at the bound on generated tokens.
    """

    num_steps: int = 0
    unanswered: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    length_stops: int = 0

    @property
    def step_count(self) -> int:
        """Time steps since FIRST."""
        return self.num_steps + self.unanswered

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens

    def add(self, action: LLMResponse | object | None) -> None:
        """Counts one step and its response, if there is one. The cost of another package's action is not known."""
        if action is None:
            self.unanswered += 1
            return
        self.num_steps += 1
        if isinstance(action, LLMResponse):
            self.pay(action)

    def pay(self, response: LLMResponse) -> None:
        """Counts what a response costs, also if the episode does not get it."""
        self.prompt_tokens += response.usage.prompt_tokens
        self.generated_tokens += response.usage.generated_tokens
        self.cost += response.cost
        self.length_stops += response.finish_reason == "length"


class Outcome(StrEnum):
    """Outcome of an episode, known where it happened."""

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
        """Returns the outcome of an episode that `error` ended."""
        classes: tuple[tuple[type[BaseException], Outcome], ...] = (
            (asyncio.CancelledError, cls.CANCELLED),
            (KeyboardInterrupt, cls.CANCELLED),
            (BudgetExhaustedError, cls.CANCELLED),
            (StorageError, cls.CANCELLED),
            (UnreachableError, cls.CANCELLED),
            (AgentError, cls.AGENT_ERROR),
            (HostLostError, cls.LOST),
            (ContainerError, cls.CONTAINER_ERROR),
            (VerifierError, cls.VERIFIER_ERROR),
            (PolicyError, cls.POLICY_ERROR),
        )
        return next((outcome for kind, outcome in classes if isinstance(error, kind)), cls.ERRORED)


UNFINISHED = frozenset({Outcome.CANCELLED, Outcome.LOST, Outcome.ABANDONED, Outcome.CLOSED})
"""Outcomes that say nothing about the attempt."""

RESPONSES_USED_UP = frozenset({Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.ABANDONED})
"""Outcomes after which the response log may be deleted: the attempt has a result, or starts from the start."""


HOST_IMAGE = "host"
"""What stands for the image of a container whose files are this host's own."""

MAX_MESSAGE = 20_000
"""Maximum length of an error's text, in characters, so that a row can be read back whatever the error quotes."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error, or the limit that truncated an episode.

    Attributes:
        type: Name of the exception's class; `limit` for a limit, but for `agent_exit`, which has an exception.
        message: Text for people.
        limit: The limit that was reached: `steps`, `time`, `tokens`, `cost`, a name that only its environment uses, or
            `unknown`; `None` for an error.
    """

    type: Text
    message: Text
    limit: Text | None = None

    @classmethod
    def of_limit(cls, limit: str | None, note: str | None = None) -> Self:
        """Makes the record of a limit, with a note on it; `None`: the environment does not say which."""
        name = limit or "unknown"
        if name == "agent_exit" and note:
            return cls(AgentExitError.__name__, _bounded(note), name)
        return cls("limit", _bounded(f"limit reached: {name}{f': {note}' if note else ''}"), name)

    def to_dict(self) -> dict[str, str]:
        """Returns the JSON-ready form; `limit` only where there is one."""
        more = {} if self.limit is None else {"limit": self.limit}
        return {"type": self.type, "message": self.message, **more}

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Makes the record of an exception."""
        return cls(type(error).__name__, _bounded(str(error) or type(error).__name__))


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}… ({len(text):,} characters)"


@dataclass(frozen=True, slots=True)
class Replayed:
    """Recorded responses of an earlier episode that were given again instead of asking the policy.

    Attributes:
        episode_id: The earlier one, of the same attempt.
        steps: How many of its responses were given again; those before a snapshot that was restored included.
        prompt_tokens, generated_tokens, cost: Sums over those responses: they are in the earlier episode's totals, too.
        from_snapshot: The step at which a snapshot was restored; `None`: it was run again from the start.
        diverged_at: The first step whose request differs from the recorded one; `None`: all are the same.
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
        """Makes the record of these responses, taken over from an earlier episode."""
        return cls(
            episode_id,
            len(responses),
            prompt_tokens=sum(response.usage.prompt_tokens for response in responses),
            generated_tokens=sum(response.usage.generated_tokens for response in responses),
            cost=sum(response.cost for response in responses),
        )


@dataclass(frozen=True, slots=True)
class EnvironmentUsage:
    """Spending of an environment on its own model calls, such as those of the oracle of twenty questions.

    Attributes:
        prompt_tokens, generated_tokens: As the engines counted them.
        cost: US dollars.
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
    """What came from an installed agent in one episode.

    Attributes:
        name: Its name.
        version: Its version, where it is pinned; of `agent=command` the digest of the files that the container gets.
        requests: HTTP requests for a response, retries included.
        retries: Those of them that asked for a response once more; they cost none.
        conversations: Names of its conversations, in the order in which they started.
        dropped: What its requests had that could not be carried.
        background requests: Calls beside its work that the policy answered without a step.
    """

    name: str
    version: str | None = None
    requests: int = 0
    retries: int = 0
    conversations: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    background_requests: int = 0

    def __add__(self, other: AgentFacts) -> AgentFacts:
        return AgentFacts(
            self.name,
            self.version,
            self.requests + other.requests,
            self.retries + other.retries,
            tuple(dict.fromkeys((*self.conversations, *other.conversations))),
            tuple(sorted({*self.dropped, *other.dropped})),
            self.background_requests + other.background_requests,
        )


@dataclass(frozen=True, slots=True)
class StageResult:
    """Result of one stage of a multi-step task.

    Attributes:
        name: Name of the stage.
        reward: Its reward; `None`: it was not verified.
        rewards: Everything its verifier scored, by key.
        truncated_by: The limit that ended its agent, if one did.
        num_steps: Time steps that its agent took: policy answers, and at its end maybe one that did not come in time.
    """

    name: str
    reward: float | None
    rewards: Mapping[str, float] = field(default_factory=dict)
    truncated_by: str | None = None
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One line of `episodes.jsonl`: one try of one attempt at one task.

    An attempt is tried again after an error (`retry`), or when the run is resumed; every try keeps its line, and the
    last one is the attempt's result.

    Attributes:
        episode_id: Unique; also names the trajectory file.
        task_name: The task.
        attempt: Number of this running of the task, from 0.
        seed: Seed of this episode.
        outcome: Its outcome.
        reward: The episode's reward: the verifier's, or with scorers the weighted sum of it and theirs; `None` when
            there is none (never 0.0 for want of a better number).
        rewards: Everything the verifier scored, by key, and every scorer, by name.
        note: Why the reward says nothing about the tests, if they could not be run or graded, or why an episode that
            a limit ended has none; for people.
        error: What went wrong, or the limit that truncated it.
        num_steps: Steps after the first request: policy answers, and any that did not come in time. The trajectory's
            `num_steps` counts the record of the first request, too.
        prompt_tokens, generated_tokens: Token totals of the policy over the episode.
        cost: US dollars of the policy over the episode.
        length_stops: Policy answers that ended at the bound on generated tokens (`finish_reason` is `length`).
        format_errors: Policy answers that the agent could not use, as far as it counts them (`agent=shell` does).
        started_at, finished_at: Epoch seconds, as `start_time` and `end_time` of the trajectory: from the making of the
            environment to the verdict.
        phase_sec: Wall seconds by phase: `start`, `agent`, `policy`, `verify`, `score`; and `snapshot`, what the
            episode waited for its snapshots after the policy had answered.
        container_image: What the container's files came from: an image's name, or `HOST_IMAGE`; `None` if it never
            started.
        snapshots: Number of its snapshots that are kept.
        snapshot_failures: Number of snapshots that could not be taken or deleted.
        retry: Number of earlier tries of this attempt.
        replayed: Responses that it took over from an earlier try, if it did.
        stages: Results of its stages; empty for a single-stage task.
        environment_usage: Spending of its environment in this try, beside the policy's; `None` for an environment that
            makes no model calls. Answers taken over from an earlier try are counted in that try alone.
        agent: What came from its agent, an installed one; `None` for any other.
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
        """The limit that truncated it; `None` when none did."""
        return self.error.limit if self.error is not None else None

    @property
    def duration_sec(self) -> float:
        """Wall seconds from start to finish."""
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
        """Returns one row of a table: plain values, one a column, mappings by `name.key`; the stages stay a list."""
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
        """Inverts `to_dict`; leaves out fields that this version does not know.

        Raises:
            ValueError: `data` is not a valid result; the message says why.
        """
        return validated(cls, data)


_FIELDS = tuple(field.name for field in fields(EpisodeResult))
_MAPPINGS = frozenset({"rewards", "phase_sec", "replayed", "environment_usage", "agent"})
"""Fields of a row with keys or fields of their own, some of them `None`: they become columns where they have some."""


def attempt_of(episode_id: str) -> str:
    """Returns the start that the ids of all episodes of an attempt share."""
    found = _OF_AN_ATTEMPT.fullmatch(episode_id)
    return found[1] if found else episode_id


def final_results(results: Iterable[EpisodeResult]) -> tuple[EpisodeResult, ...]:
    """Returns the last try of every attempt, in the order in which the attempts first appear."""
    last: dict[tuple[str, int], EpisodeResult] = {}
    for result in results:
        slot = result.task_name, result.attempt
        if slot not in last or result.retry >= last[slot].retry:
            last[slot] = result
    return tuple(last.values())


def reward_names(results: Iterable[EpisodeResult]) -> list[str]:
    """Returns the names of the rewards that are something else than the reward of their episode, as first met."""
    named: dict[str, bool] = {}
    for result in results:
        for name, value in result.rewards.items():
            named[name] = named.get(name, False) or name != "reward" or value != result.reward
    return [name for name, is_another in named.items() if is_another]


def count_outcomes(results: Iterable[EpisodeResult]) -> dict[str, int]:
    """Counts episodes by outcome; leaves out outcomes that did not occur."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result.outcome.value] = counts.get(result.outcome.value, 0) + 1
    return counts
