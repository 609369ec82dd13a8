"""Trajectory records: what is kept of an episode, in memory and on disk.

File format (schema version 1): one JSON object with the fields of `EpisodeTrajectory`. Each request repeats the whole
conversation, so the file keeps every message once: `messages` is the list of all of them, and an observation has
`message_ranges`, a list of `[start, stop)` pairs into it, in place of `messages`. Loading gives the full objects back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from ares_exp.environments.time_step import StepType
from ares_exp.errors import TrajectoryFormatError
from ares_exp.llms.request import REQUEST_DEFAULTS, FrozenList, LLMRequest, Message, freeze
from ares_exp.llms.response import OPTIONAL_RESPONSE_FIELDS, LLMResponse, Usage, piece_from_dict, piece_to_dict
from ares_exp.results import ErrorInfo, Outcome
from ares_exp.run_dir import dump_json

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 4 * 1024**3


def serialize_llm_request(request: LLMRequest) -> Mapping[str, Any]:
    """A JSON-ready dict of `request`, frozen; fields at their default are left out."""
    data = {"messages": request.messages}
    for name, default in REQUEST_DEFAULTS.items():
        if (value := getattr(request, name)) != default:
            data[name] = value
    return Message(data)


def deserialize_llm_request(data: Mapping[str, Any]) -> LLMRequest:
    """The inverse of `serialize_llm_request`. Raises `TypeError` for unknown or missing fields."""
    return LLMRequest(**data)


def serialize_llm_response(response: LLMResponse) -> Mapping[str, Any]:
    """A JSON-ready dict of `response`, frozen; optional fields that are `None` are left out."""
    usage = response.usage
    data = {
        "data": FrozenList([Message(piece_to_dict(piece)) for piece in response.data]),
        "cost": response.cost,
        "usage": Message(prompt_tokens=usage.prompt_tokens, generated_tokens=usage.generated_tokens),
    }
    for name in OPTIONAL_RESPONSE_FIELDS:
        if (value := getattr(response, name)) is not None:
            data[name] = freeze(value)
    return Message(data)


def deserialize_llm_response(data: Mapping[str, Any]) -> LLMResponse:
    """The inverse of `serialize_llm_response`. Raises `TypeError`, `KeyError` or `ValueError` for anything else."""
    pieces = [piece_from_dict(piece) for piece in data["data"]]
    return LLMResponse(**{**data, "data": pieces, "usage": Usage(**data["usage"])})


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One time step and the action that led to it.

    Attributes:
        step_index: 0 for FIRST, then counting up.
        step_type: `"FIRST"`, `"MID"` or `"LAST"`.
        observation: The pending request as `serialize_llm_request` gives it; `None` on LAST.
        action: The response that led here as `serialize_llm_response` gives it; `None` on FIRST.
        reward: As in the time step; `None` on FIRST.
        discount: As in the time step; `None` on FIRST.
        timestamp: Epoch seconds.
    """

    step_index: int
    step_type: StepType
    observation: Mapping[str, Any] | None
    action: Mapping[str, Any] | None
    reward: float | None
    discount: float | None
    timestamp: float

    def __post_init__(self) -> None:
        """Freezes observation and action: the agent's later edits must not reach the record."""
        object.__setattr__(self, "observation", freeze(self.observation))
        object.__setattr__(self, "action", freeze(self.action))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, messages in full."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; keys of later versions are ignored."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class EpisodeTrajectory:
    """One episode, whole.

    Attributes:
        episode_id: Unique id.
        task_name: The task.
        steps: All records, FIRST included.
        start_time, end_time: Epoch seconds.
        total_reward: Sum of the steps' rewards when the episode reached a LAST step that has one, else `None`.
        num_steps: Number of records, FIRST included.
        truncated: Whether a limit ended it.
        outcome: How it ended.
        error: What went wrong, or the limit that truncated it; else `None`.
    """

    episode_id: str
    task_name: str
    steps: tuple[StepRecord, ...]
    start_time: float
    end_time: float
    total_reward: float | None
    num_steps: int
    truncated: bool
    outcome: Outcome
    error: ErrorInfo | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form as in the file, but with every observation's messages in full."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        data["steps"] = [step.to_dict() for step in self.steps]
        data["error"] = asdict(self.error) if self.error is not None else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`, and of the file's form with its shared messages.

        Raises:
            TrajectoryFormatError: A field is missing or has the wrong form.
        """
        version = data.get("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise TrajectoryFormatError(f"Expected schema_version {SCHEMA_VERSION}, got {version!r}: update ares_exp.")
        try:
            values = {field.name: data[field.name] for field in fields(cls)}
            table = tuple(freeze(message) for message in data.get("messages", ()))
            steps = tuple(StepRecord.from_dict(_with_messages(step, table)) for step in data["steps"])
            error = ErrorInfo(**values["error"]) if values["error"] is not None else None
            return cls(**{**values, "steps": steps, "error": error, "outcome": Outcome(values["outcome"])})
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise TrajectoryFormatError(f"Expected a trajectory, got {type(error).__name__}: {error}") from error

    def to_json(self) -> str:
        """The file's text: every message once."""
        data = self.to_dict()
        table = MessageTable()
        data["steps"] = [_without_messages(step, table) for step in data["steps"]]
        return dump_json({"schema_version": SCHEMA_VERSION, **data, "messages": table.messages})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a file that `JsonTrajectoryCollector` wrote.

        Raises:
            TrajectoryFormatError: The file is missing, no JSON, or no trajectory; the message names the path.
        """
        path = Path(path)
        try:
            if (size := path.stat().st_size) > MAX_FILE_BYTES:
                raise TrajectoryFormatError(f"{path}: expected at most {MAX_FILE_BYTES} bytes, got {size}.")
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise TrajectoryFormatError(f"{path}: expected a JSON object, got {type(data).__name__}.")
            return cls.from_dict(data)
        except TrajectoryFormatError as error:
            raise TrajectoryFormatError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
        except (OSError, ValueError, RecursionError) as error:
            raise TrajectoryFormatError(f"{path}: {error}") from error


class MessageTable:
    """Every distinct message of an episode once, in order of appearance."""

    def __init__(self) -> None:
        """An empty table."""
        self.messages: list[Mapping[str, Any]] = []
        self._by_content: dict[object, int] = {}

    def ranges(self, messages: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The `[start, stop)` pairs that spell `messages`; messages not seen before are added."""
        ranges: list[list[int]] = []
        for index in map(self._index, messages):
            if ranges and ranges[-1][1] == index:
                ranges[-1][1] = index + 1
            else:
                ranges.append([index, index + 1])
        return ranges

    def _index(self, message: Mapping[str, Any]) -> int:
        # The same conversation comes again and again: a string keeps its hash, so texts cost nothing to look up.
        plain = all(type(value) is str for value in message.values())
        key = tuple(message.items()) if plain else json.dumps(message)
        index = self._by_content.setdefault(key, len(self.messages))
        if index == len(self.messages):
            self.messages.append(message)
        return index


def _without_messages(step: dict[str, Any], table: MessageTable) -> dict[str, Any]:
    observation = step["observation"]
    if not isinstance(observation, Mapping) or "messages" not in observation:
        return step
    rest = {name: value for name, value in observation.items() if name != "messages"}
    return {**step, "observation": {"message_ranges": table.ranges(observation["messages"]), **rest}}


def _with_messages(step: Mapping[str, Any], table: tuple[Any, ...]) -> Mapping[str, Any]:
    observation = step["observation"]
    if not isinstance(observation, Mapping) or "message_ranges" not in observation:
        return step
    rest = {name: value for name, value in observation.items() if name != "message_ranges"}
    messages: list[Any] = []
    for start, stop in observation["message_ranges"]:
        if not 0 <= start < stop <= len(table):
            raise IndexError(f"message range [{start}, {stop}) lies outside the {len(table)} messages")
        messages += table[start:stop]
    return {**step, "observation": {"messages": messages, **rest}}
