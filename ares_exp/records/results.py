"""The results of episodes, as in `episodes.jsonl`, and the totals of a run: outcomes, rewards, errors and usage."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
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
from ares_exp.records import exit_codes
from ares_exp.records.validation import Amount, Count, Text, fields_of, validated

_OF_AN_ATTEMPT = re.compile(r"(.+__\d+)__\w+")
"""Pattern of an episode id: the task, the attempt, and a suffix that differs between the episodes of an attempt."""


@dataclass(slots=True)
class EpisodeUsage:
    """The number of steps, the tokens and the cost of one episode so far.

    Attributes:
        num_steps: Number of responses.
        unanswered: Number of steps without a response, because a time limit was reached.
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
        """The number of steps, including steps without a response."""
        return self.num_steps + self.unanswered

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.prompt_tokens + self.generated_tokens

    def add(self, action: LLMResponse | object | None) -> None:
        """Counts a step. `action` is `None` if there was no response. Only an `LLMResponse` adds tokens and cost."""
        if action is None:
            self.unanswered += 1
            return
        self.num_steps += 1
        if isinstance(action, LLMResponse):
            self.pay(action)

    def pay(self, response: LLMResponse) -> None:
        """Counts the tokens and cost of a response without counting a step."""
        self.prompt_tokens += response.usage.prompt_tokens
        self.generated_tokens += response.usage.generated_tokens
        self.cost += response.cost
        self.length_stops += response.finish_reason == "length"


class Outcome(StrEnum):
    """The way in which an episode ended."""

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
        """Returns the outcome of an episode that the exception `error` ended."""
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
"""Outcomes of episodes that were interrupted. After such an outcome, the attempt still has no result."""

RESPONSES_USED_UP = frozenset({Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.ABANDONED})
"""Outcomes after which the response log can be deleted, because no later episode replays its responses."""


HOST_IMAGE = "host"
"""Value of `container_image` for a container that uses this machine's own files instead of an image."""

MAX_MESSAGE = 20_000
"""Maximum length of a recorded error message, in characters. It keeps rows below the size limit of their readers."""


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """The record of an error that ended an episode, or of a limit that truncated it.

    Attributes:
        type: Class name of the exception, or `limit` for a limit. For the limit `agent_exit`, the class name of the
            agent's exception.
        message: Human-readable message.
        limit: Limit that was reached, such as `steps`, `time`, `tokens`, `cost`, `agent_exit`, or a limit that the
            environment defines; `unknown` if it has no name; `None` for an error.
    """

    type: Text
    message: Text
    limit: Text | None = None

    @classmethod
    def of_limit(cls, limit: str | None, note: str | None = None) -> Self:
        """Creates the record of a limit from its name (`None` means `unknown`). `note` is added to the message."""
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
    """The responses that an episode replayed from an earlier episode of the same attempt, instead of using the policy.

    Attributes:
        episode_id: Id of the earlier episode.
        steps: Number of replayed responses, including the responses from before a restored snapshot.
        prompt_tokens, generated_tokens, cost: Sums over the replayed responses. The totals of the earlier episode also
            contain these amounts.
        from_snapshot: Step of the restored snapshot; `None` if the replay started at the first step.
        diverged_at: First step whose request differs from the recorded request; `None` if no request differs.
    """

    episode_id: str
    steps: Count = 0
    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    cost: Amount = 0.0
    from_snapshot: Count | None = None
    diverged_at: Count | None = None

    @classmethod
    def of(cls, episode_id: str, responses: Sequence[LLMResponse]) -> Self:
        """Creates the record from the replayed responses."""
        return cls(
            episode_id,
            len(responses),
            prompt_tokens=sum(response.usage.prompt_tokens for response in responses),
            generated_tokens=sum(response.usage.generated_tokens for response in responses),
            cost=sum(response.cost for response in responses),
        )


@dataclass(frozen=True, slots=True)
class EnvironmentUsage:
    """Tokens and cost of an environment's own model calls, such as the oracle's calls in twenty questions.

    Attributes:
        prompt_tokens, generated_tokens: Total tokens, as reported by the models' endpoints.
        cost: Total cost in US dollars.
    """

    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    cost: Amount = 0.0

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
        version: Configured version of the agent; `None` if no version was configured. For `agent=command`, the digest
            of the files in the container.
        requests: Number of HTTP requests for responses, including retries.
        retries: Number of requests that the agent repeated for the same response. They do not cause additional costs.
        conversations: Names of the agent's conversations, in order of their first requests.
        dropped: Names of unsupported fields that were removed from the requests.
        background_requests: Number of background requests, such as requests for titles, which are not steps.
        refused: Number of HTTP requests that were rejected, for example because of a wrong key.
        last_refusal: Method, path, status and reason of the last rejected request; `None` if none was rejected.
    """

    name: str
    version: str | None = None
    requests: Count = 0
    retries: Count = 0
    conversations: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    background_requests: Count = 0
    refused: Count = 0
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
        rewards: All scores from the stage's verifier, by name.
        truncated_by: Limit that ended the stage; `None` if no limit was reached.
        num_steps: Number of responses in the stage, plus 1 if the last request got no response in time.
    """

    name: str
    reward: Amount | None
    rewards: Mapping[str, Amount] = field(default_factory=dict)
    truncated_by: str | None = None
    num_steps: Count = 0


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One line of `episodes.jsonl`: the result of one episode.

    If an attempt is retried after an error, or run again in a resumed run, it gets another episode. The file keeps the
    lines of all episodes. The result of the attempt is the result of its last episode.

    Attributes:
        episode_id: Unique id of the episode, which is also the name of its trajectory file.
        task_name: Name of the task.
        attempt: Number of the attempt at the task, from 0.
        seed: Seed of this episode.
        outcome: Outcome of the episode.
        reward: Reward of the episode: the verifier's reward, or its weighted sum with the scorers' rewards. `None`,
            never 0.0, if the episode has no reward.
        rewards: All numbers from the verifier, by key, and from the scorers, by name.
        note: Reason why the tests could not be run or graded, or why there is no reward after a limit; otherwise
            `None`.
        error: Error that ended the episode, or limit that truncated it; `None` if it was completed.
        num_steps: Number of steps after the first time step (FIRST), including a step whose response did not arrive in
            time. The trajectory's `num_steps` also counts FIRST.
        prompt_tokens, generated_tokens: Total tokens of the policy's responses.
        cost: Total cost of the policy's responses, in US dollars.
        length_stops: Number of responses that were cut off at the token limit (`finish_reason` is `length`).
        format_errors: Number of responses that the agent could not use; 0 if the agent does not count them.
        started_at, finished_at: Time at which the environment was created, and time at which the result was final, in
            epoch seconds. They equal `start_time` and `end_time` of the trajectory.
        phase_sec: Wall-clock seconds by phase: `start`, `agent`, `policy`, `verify`, `score` and `snapshot` (the wait
            for snapshots after a response).
        container_image: Origin of the container's files: the name of an image, or `HOST_IMAGE`. `None` if the container
            never started.
        snapshots: Number of stored snapshots of the episode.
        snapshot_failures: Number of snapshots that could not be taken or deleted.
        retry: Number of earlier episodes of this attempt.
        replayed: Responses that were replayed from an earlier episode; `None` if no responses were replayed.
        stages: Results of the stages; empty for a single-stage task.
        environment_usage: Tokens and cost of the environment's own model calls, which the policy's usage does not
            include. `None` without such calls. Responses that were taken over from an earlier episode count only in
            that episode.
        agent: Facts about a third-party agent that is installed in the container; `None` for other agents.
    """

    episode_id: str
    task_name: str
    attempt: Count
    seed: int
    outcome: Outcome
    reward: Amount | None
    rewards: Mapping[str, Amount] = field(default_factory=dict)
    error: ErrorInfo | None = None
    num_steps: Count = 0
    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    cost: Amount = 0.0
    started_at: Amount = 0.0
    finished_at: Amount = 0.0
    phase_sec: Mapping[str, Amount] = field(default_factory=dict)
    container_image: str | None = None
    snapshots: Count = 0
    snapshot_failures: Count = 0
    retry: Count = 0
    replayed: Replayed | None = None
    stages: tuple[StageResult, ...] = ()
    environment_usage: EnvironmentUsage | None = None
    length_stops: Count = 0
    format_errors: Count = 0
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
        """Returns the result as a JSON-ready dict."""
        return fields_of(self) | {
            "rewards": dict(self.rewards),
            "error": self.error.to_dict() if self.error is not None else None,
            "phase_sec": dict(self.phase_sec),
            "replayed": asdict(self.replayed) if self.replayed is not None else None,
            "stages": tuple(map(asdict, self.stages)),
            "environment_usage": asdict(self.environment_usage) if self.environment_usage is not None else None,
            "agent": asdict(self.agent) if self.agent is not None else None,
        }

    def to_row(self) -> dict[str, Any]:
        """Returns the result as one row of a table, which contains no nested mappings.

        A mapping becomes several columns with names like `rewards.tests`. The stages remain a list.
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
        """Creates a result from the output of `to_dict`. Ignores unknown fields.

        Raises:
            ValueError: `data` is not a valid result. The message explains why.
        """
        return validated(cls, data)


_MAPPINGS = frozenset({"rewards", "phase_sec", "replayed", "environment_usage", "agent"})
"""Fields that are mappings or `None`. In a table, each key of such a mapping becomes a column."""


def attempt_of(episode_id: str) -> str:
    """Returns the part of an episode id that all episodes of the same attempt have in common."""
    found = _OF_AN_ATTEMPT.fullmatch(episode_id)
    return found[1] if found else episode_id


def final_results(results: Iterable[EpisodeResult]) -> tuple[EpisodeResult, ...]:
    """Returns the result of each attempt's last episode, in the order of the attempts' first episodes."""
    last: dict[tuple[str, int], EpisodeResult] = {}
    for result in results:
        slot = result.task_name, result.attempt
        if slot not in last or result.retry >= last[slot].retry:
            last[slot] = result
    return tuple(last.values())


def reward_names(results: Iterable[EpisodeResult]) -> list[str]:
    """Returns all names in `rewards`, in order of appearance. Omits `reward` if it repeats each result's `reward`."""
    given = [(name, value != result.reward) for result in results for name, value in result.rewards.items()]
    names = dict.fromkeys(name for name, _ in given)
    return [name for name in names if name != "reward" or ("reward", True) in given]


def count_outcomes(results: Iterable[EpisodeResult]) -> dict[str, int]:
    """Returns the number of episodes for each outcome that occurred."""
    return dict(Counter(result.outcome.value for result in results))


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The totals of a run, computed from its results.

    Attributes:
        planned: Number of planned attempts.
        results: Results of all episodes, including retried ones, in the order in which they ended.
        interrupted: Whether Ctrl-C or SIGTERM ended the run.
        ended_by: Message about the exhausted budget or failed write that ended the run; `None` if it ended otherwise.
        wall_sec: Wall-clock seconds of all sessions of the run.
        recording_failures: Number of trajectories, metrics and summary files that could not be recorded.
        unwritten_rows: Number of results that are missing in `episodes.jsonl`.
        snapshot_dir: Directory of the snapshots; `None` if the run does not take snapshots.
        max_loop_lag_sec: Longest time for which the event loop was blocked, in seconds.
        threshold: Minimum reward of an attempt that passes.
        must_pass: Whether every attempt should pass, because the policy ran the tasks' reference solutions.
        spenders: Descriptions of the components whose model calls count as `environment_usage`; empty if unknown.
    """

    planned: int
    results: tuple[EpisodeResult, ...] = field(repr=False)  # for large runs, the repr would take seconds
    interrupted: bool = False
    ended_by: str | None = None
    wall_sec: float = 0.0
    recording_failures: int = 0
    unwritten_rows: int = 0
    snapshot_dir: Path | None = None
    max_loop_lag_sec: float = 0.0
    threshold: float = 1.0
    must_pass: bool = False
    spenders: tuple[str, ...] = ()

    @property
    def final(self) -> tuple[EpisodeResult, ...]:
        """The result of the last episode of each attempt."""
        return final_results(self.results)

    @property
    def finished(self) -> tuple[EpisodeResult, ...]:
        """The results of all attempts that ended without an interruption, including attempts with an error."""
        return tuple(result for result in self.final if result.outcome not in UNFINISHED)

    @property
    def scored(self) -> tuple[EpisodeResult, ...]:
        """The results of the attempts that have a reward."""
        return tuple(result for result in self.final if result.reward is not None)

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of the attempts that have a reward; `None` if there are no rewards."""
        rewards = [result.reward for result in self.scored if result.reward is not None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def broken(self) -> tuple[EpisodeResult, ...]:
        """The results with rewards below the threshold, if reference solutions ran (`must_pass`); otherwise empty."""
        scored = self.scored if self.must_pass else ()
        return tuple(one for one in scored if one.reward is not None and one.reward < self.threshold)

    @property
    def complete(self) -> bool:
        """Whether every planned attempt has a reward, and all rows were written."""
        return len(self.scored) == self.planned and not self.unwritten_rows

    @property
    def exit_code(self) -> int:
        """The exit code of the command that executes the run."""
        if self.interrupted:
            return exit_codes.INTERRUPTED
        return exit_codes.COMPLETE if self.complete and not self.broken else exit_codes.INCOMPLETE

    def count(self) -> dict[str, int]:
        """Returns the number of attempts for each outcome of their last episode."""
        return count_outcomes(self.final)

    def paid(self) -> dict[str, float]:
        """Sums the policy's tokens and cost (in US dollars) over all episodes.

        A response that a later episode replayed was paid only once, and is counted only once.
        """
        names = ("prompt_tokens", "generated_tokens", "cost")
        known = {result.episode_id for result in self.results}
        replayed = (result.replayed for result in self.results)
        taken_over = [one for one in replayed if one is not None and one.episode_id in known]
        return {
            name: sum(getattr(result, name) for result in self.results) - sum(getattr(one, name) for one in taken_over)
            for name in names
        }

    @property
    def environment_usage(self) -> EnvironmentUsage | None:
        """The tokens and cost of the environments' own models in all episodes; `None` if there are no such models."""
        used = [result.environment_usage for result in self.results if result.environment_usage is not None]
        return sum(used, EnvironmentUsage()) if used else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the totals in JSON-ready form, as in `summary.json`, without the results of the episodes."""
        return {
            "planned": self.planned,
            "finished": len(self.finished),
            "tries": len(self.results),
            "scored": len(self.scored),
            "mean_reward": self.mean_reward,
            "outcomes": self.count(),
            **self.paid(),
            "environment_usage": asdict(used) if (used := self.environment_usage) is not None else None,
            "threshold": self.threshold,
            **({"must_pass": True} if self.must_pass else {}),
            "interrupted": self.interrupted,
            "ended_by": self.ended_by,
            "wall_sec": self.wall_sec,
            "max_loop_lag_sec": self.max_loop_lag_sec,
            "recording_failures": self.recording_failures,
            "unwritten_rows": self.unwritten_rows,
            "snapshots": sum(result.snapshots for result in self.results),
            "snapshot_failures": sum(result.snapshot_failures for result in self.results),
            "snapshot_wait_sec": sum(result.phase_sec.get("snapshot", 0.0) for result in self.results),
        }
