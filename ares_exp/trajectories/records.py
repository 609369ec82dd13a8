"""The records of episodes and steps in memory. `episode_file` and `step_encoding` describe their form in files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ares_exp.containers.activity import BackgroundRequest, CommandRecord
from ares_exp.environment import BACKGROUND_PREFIX, MAIN_CONVERSATION, StepType
from ares_exp.errors import TrajectoryFormatError
from ares_exp.llms.request import (
    REQUEST_DEFAULTS,
    FrozenList,
    LLMRequest,
    Message,
    freeze,
    origin_from_dict,
    origin_to_dict,
)
from ares_exp.llms.response import (
    OPTIONAL_RESPONSE_FIELDS,
    ORACLE_MODEL,
    LLMResponse,
    Usage,
    piece_from_dict,
    piece_to_dict,
    usage_to_dict,
)
from ares_exp.records.results import ErrorInfo, Outcome
from ares_exp.records.validation import Flag, Integer, Number, Table, Text, fields_of, validated


def serialize_llm_request(request: LLMRequest) -> Mapping[str, Any]:
    """Converts a request to an immutable, JSON-ready mapping. Omits fields that have their default value."""
    data: dict[str, Any] = {"messages": request.messages}
    for name, default in REQUEST_DEFAULTS.items():
        if (value := getattr(request, name)) != default:
            data[name] = value
    if request.origin is not None:
        data["origin"] = origin_to_dict(request.origin)
    return Message(data)


def deserialize_llm_request(data: Mapping[str, Any]) -> LLMRequest:
    """Parses the result of `serialize_llm_request`. Raises `TypeError` or `ValueError` if it is invalid."""
    origin = data.get("origin")
    return LLMRequest(**{**data, "origin": origin_from_dict(origin) if isinstance(origin, Mapping) else None})


def conversation_of(request: Mapping[str, Any]) -> str:
    """Returns the name of the conversation of a serialized request (see `serialize_llm_request`)."""
    origin = request.get("origin")
    conversation = origin.get("conversation") if isinstance(origin, Mapping) else None
    return conversation if isinstance(conversation, str) else MAIN_CONVERSATION


def _with_main(steps: Sequence[StepRecord], *, is_whole: bool) -> tuple[StepRecord, ...]:
    """Renames the first conversation to `main` if no conversation has this name and the first one has no tools.

    In an incomplete episode (`is_whole` is false), the first conversation may be a background request, such as a
    request for a title. It is then renamed only if its number of messages differs between requests.
    """
    requests = [step.observation for step in steps if step.observation is not None]
    names = [conversation_of(request) for request in requests]
    if MAIN_CONVERSATION in names or not any(name.startswith(BACKGROUND_PREFIX) for name in names[:1]):
        return tuple(steps)
    own = [request for request, name in zip(requests, names, strict=True) if name == names[0]]
    if not is_whole and len({len(request.get("messages", ())) for request in own}) == 1:
        return tuple(steps)
    renamed: list[StepRecord] = []
    for step in steps:
        if step.observation is not None and conversation_of(step.observation) == names[0]:
            origin = {name: value for name, value in step.observation["origin"].items() if name != "conversation"}
            step = replace(step, observation=Message({**step.observation, "origin": Message(origin)}))
        renamed.append(step)
    return tuple(renamed)


def serialize_llm_response(response: LLMResponse) -> Mapping[str, Any]:
    """Converts a response to an immutable, JSON-ready mapping. Omits optional fields that are `None`."""
    data = {
        "data": FrozenList([Message(piece_to_dict(piece)) for piece in response.data]),
        "cost": response.cost,
        "usage": Message(usage_to_dict(response.usage)),
    }
    for name in OPTIONAL_RESPONSE_FIELDS:
        if (value := getattr(response, name)) is not None:
            data[name] = value
    frozen: Mapping[str, Any] = freeze(data)
    return frozen


def deserialize_llm_response(data: Mapping[str, Any]) -> LLMResponse:
    """Parses the result of `serialize_llm_response`. Raises `TypeError`, `KeyError` or `ValueError` if invalid."""
    pieces = [piece_from_dict(piece) for piece in data["data"]]
    return LLMResponse(**{**data, "data": pieces, "usage": Usage(**data["usage"])})


@dataclass(frozen=True, slots=True)
class BackgroundRecord:
    """A background request of the agent and its response. A background request belongs to a step, but is not a step.

    Attributes:
        request: The request, as `serialize_llm_request` returns it.
        response: The response, as `serialize_llm_response` returns it.
    """

    request: Table
    response: Table

    def __post_init__(self) -> None:
        """Freezes the request and the response, so that later changes by the agent do not affect the record."""
        object.__setattr__(self, "request", freeze(self.request))
        object.__setattr__(self, "response", freeze(self.response))

    @classmethod
    def of(cls, asked: BackgroundRequest) -> BackgroundRecord:
        """Creates the record of a background request."""
        return cls(serialize_llm_request(asked.request), serialize_llm_response(asked.response))

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form."""
        return {"request": self.request, "response": self.response}


STEP_FIELDS = (
    "step_index", "step_type", "reward", "discount", "timestamp", "policy_sec", "environment_sec", "container_sec",
)  # fmt: skip
"""Fields of `StepRecord` that exports copy unchanged."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One time step of an episode, and the action that led to it.

    Attributes:
        step_index: Index of the step, starting at 0 for FIRST.
        step_type: `"FIRST"`, `"MID"` or `"LAST"`.
        observation: The pending request, as `serialize_llm_request` returns it; `None` on LAST.
        action: The response that led to this step, as `serialize_llm_response` returns it; `None` on FIRST.
        reward: Reward of the time step; `None` on FIRST.
        discount: Discount of the time step; `None` on FIRST.
        timestamp: Epoch seconds.
        policy_sec: Seconds of wall-clock time from the previous time step to this action; `None` on FIRST, or if
            unknown.
        environment_sec: Seconds of wall-clock time of the environment's `reset()` or `step()`; `None` if unknown.
        container_sec: Part of `environment_sec` for container calls: start and set-up, the agent's commands and
            transfers, and the verifier. The times of concurrent calls are added up. `None` if unknown.
        commands: Commands that the agent ran in the container, in the order in which they ended.
        background_requests: Background requests since the previous time step.
    """

    step_index: Integer
    step_type: StepType
    observation: Table | None
    action: Table | None
    reward: Number | None
    discount: Number | None
    timestamp: Number
    policy_sec: Number | None = None
    environment_sec: Number | None = None
    container_sec: Number | None = None
    commands: tuple[CommandRecord, ...] = ()
    background_requests: tuple[BackgroundRecord, ...] = ()

    def __post_init__(self) -> None:
        """Freezes mutable fields, so that later changes by the agent do not affect the record."""
        object.__setattr__(self, "observation", freeze(self.observation))
        object.__setattr__(self, "action", freeze(self.action))

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form. Unlike a step in a file, it contains all messages of the request."""
        data = fields_of(self)
        data["commands"] = [command_to_dict(command) for command in self.commands]
        data["background_requests"] = [background_request.to_dict() for background_request in self.background_requests]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepRecord:
        """Creates a record from the result of `to_dict`. Raises `ValueError` if a field is missing or invalid."""
        return validated(cls, data)


def command_to_dict(command: CommandRecord) -> dict[str, Any]:
    """Returns a JSON-ready dict of a command, ten times faster than `asdict`."""
    return {
        "command": command.command,
        "exit_code": command.exit_code,
        "duration_sec": command.duration_sec,
        "timed_out": command.timed_out,
    }


@dataclass(frozen=True, slots=True)
class EpisodeTrajectory:
    """The record of one episode: its steps, its result, and how it ended.

    Attributes:
        episode_id: Unique id.
        task_name: The task.
        steps: Records of all time steps, including FIRST.
        start_time, end_time: Epoch seconds.
        total_reward: Sum of the steps' rewards. `None` if there is no LAST step, or if LAST has no reward and the
            rewards of all other steps are 0.0.
        num_steps: Number of `steps`, including FIRST.
        truncated: Whether a limit ended the episode.
        outcome: Outcome of the episode.
        error: The error that ended the episode, or the limit that truncated it; otherwise `None`.
        metadata: JSON-ready metadata, such as attempt, seed and agent.
        unfinished_step: Partial record (action, commands and times) of a `reset()` or `step()` that raised an exception
            and ended the episode; otherwise `None`.
        rewards: All rewards of the verifier and of the scorers, by name; may be empty.
    """

    episode_id: Text
    task_name: Text
    steps: tuple[StepRecord, ...]
    start_time: Number
    end_time: Number
    total_reward: Number | None
    num_steps: Integer
    truncated: Flag
    outcome: Outcome
    error: ErrorInfo | None = None
    metadata: Table = field(default_factory=Message)
    unfinished_step: StepRecord | None = None
    rewards: Mapping[Text, Number] = field(default_factory=Message)

    def __post_init__(self) -> None:
        """Freezes mutable fields, and names the main conversation if the agent offers no tools (see `_with_main`)."""
        object.__setattr__(self, "steps", _with_main(self.steps, is_whole=self.outcome is Outcome.COMPLETED))
        object.__setattr__(self, "metadata", freeze(self.metadata))
        object.__setattr__(self, "rewards", freeze(self.rewards))

    @property
    def limit(self) -> str | None:
        """The limit that truncated the episode; `None` if the episode was not truncated."""
        return self.error.limit if self.error is not None else None

    @property
    def is_of_oracle(self) -> bool:
        """Whether any response came from `policy=oracle`, the reference solution of the task."""
        return any(step.action is not None and step.action.get("model") == ORACLE_MODEL for step in self.steps)

    @property
    def step_count(self) -> int:
        """Number of steps after FIRST, including an unfinished step. `episodes.jsonl` contains it as `num_steps`."""
        unfinished = self.unfinished_step
        return max(self.num_steps - 1, 0) + (unfinished is not None and unfinished.step_type != "FIRST")

    def returns_to_go(self, discount: float = 1.0) -> tuple[float | None, ...]:
        """Returns the discounted return for each action: the sum of the rewards from its step to the end.

        Args:
            discount: Factor per step, in [0, 1].

        Returns:
            `num_steps - 1` values, one per action: `reward of its step + discount * the next value`. All values are
            `None` if the episode has no reward, because a missing reward does not count as 0.0.

        Raises:
            ValueError: `discount` is outside [0, 1].
        """
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"Expected a discount between 0 and 1, got {discount!r}.")
        acted = self.steps[1:]
        if self.total_reward is None:
            return (None,) * len(acted)
        returns: list[float] = []
        for step in reversed(acted):
            returns.append((step.reward or 0.0) + discount * (returns[-1] if returns else 0.0))
        return tuple(reversed(returns))

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON-ready form, whose keys are the field names. Each observation contains all its messages."""
        data = fields_of(self)
        data["steps"] = [step.to_dict() for step in self.steps]
        data["error"] = self.error.to_dict() if self.error is not None else None
        data["unfinished_step"] = self.unfinished_step.to_dict() if self.unfinished_step is not None else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EpisodeTrajectory:
        """Creates a trajectory from `to_dict()` or a file's JSON. Raises `TrajectoryFormatError` for invalid fields."""
        from ares_exp.trajectories.files.episode_file import check_version, whole_episode
        from ares_exp.trajectories.files.step_encoding import StepDecoder

        try:
            steps = data["steps"]
            if (version := data.get("schema_version")) is not None:
                check_version(version)
                steps = map(StepDecoder().decode, steps)
            return whole_episode(data, steps)
        except BROKEN as error:
            raise TrajectoryFormatError(f"Expected a trajectory: {what_broke(error)}") from error

    @classmethod
    def load(cls, path: str | Path) -> EpisodeTrajectory:
        """Reads a file that a collector of this package wrote, which may be compressed (`.zst`).

        Raises:
            TrajectoryFormatError: The file is missing or invalid, contains several episodes, or has another schema
                version. The message contains the path and, if known, the position.
        """
        from ares_exp.trajectories.files.episode_file import find_episodes

        episodes = list(find_episodes(Path(path)))
        if len(episodes) != 1:
            raise TrajectoryFormatError(f"{path}: expected one episode, found {len(episodes)}.")
        return episodes[0].trajectory


def total_reward(steps: Sequence[StepRecord]) -> float | None:
    """Adds up the rewards of an episode. Returns `None` if there is no LAST step, or if the episode has no reward.

    The reward 0.0 of a MID step is only a default. If LAST has no reward and all other rewards are 0.0, the episode has
    no reward.
    """
    if not steps or steps[-1].step_type != "LAST":
        return None
    rewards = [step.reward for step in steps if step.reward is not None]
    return sum(rewards) if steps[-1].reward is not None or any(rewards) else None


BROKEN = (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError)
"""Exceptions that reading an invalid record can raise. They are converted to a `TrajectoryFormatError`."""


def what_broke(error: BaseException) -> str:
    """Describes why a record is invalid. `error` is an exception of a type in `BROKEN`."""
    if isinstance(error, KeyError):
        return f"the field {error} is missing"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def is_number(value: object) -> bool:
    """Returns whether a value is a float, or an integer that can be converted to a float."""
    is_integer = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**1000
    return is_integer or isinstance(value, float)


class Ending(NamedTuple):
    """How an episode ended.

    Attributes:
        error: The error, or the limit that truncated the episode; `None` if it was completed.
        reward: The reward of the LAST step; `None` if there is no reward.
    """

    outcome: Outcome
    error: ErrorInfo | None = None
    reward: float | None = None


def ending(
    last: Any, failure: BaseException | None = None, *, limit: str | None = None, note: str | None = None
) -> Ending:
    """Determines the outcome, the error and the reward of an episode that has ended.

    Args:
        last: The LAST time step or its record (an object with `reward` and `discount`); `None` without a LAST step.
        failure: The exception that ended the episode, if any. Ignored if the episode reached LAST.
        limit: The limit that ended the episode, if known.
        note: Sentence with details about this limit, if any.
    """
    if last is None:
        ended = failure or RuntimeError("the episode ended without a LAST step")
        return Ending(Outcome.of(ended), ErrorInfo.of(ended))
    reward = None if last.reward is None else float(last.reward)
    if reward is not None and not math.isfinite(reward):
        return Ending(Outcome.ERRORED, ErrorInfo("ValueError", f"the environment's reward is {reward}"))
    if last.discount:
        return Ending(Outcome.TRUNCATED, ErrorInfo.of_limit(limit, note), reward)
    return Ending(Outcome.COMPLETED, reward=reward)
