"""Trajectory records: what is kept of an episode. `step_encoding` and `episode_file` tell how they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from ares_exp.environments.activity import CommandRecord
from ares_exp.environments.time_step import StepType
from ares_exp.errors import TrajectoryFormatError
from ares_exp.llms.request import REQUEST_DEFAULTS, FrozenList, LLMRequest, Message, freeze
from ares_exp.llms.response import OPTIONAL_RESPONSE_FIELDS, LLMResponse, Usage, piece_from_dict, piece_to_dict
from ares_exp.results import ErrorInfo, Outcome
from ares_exp.trajectories.checks import BROKEN, has_type, what_broke


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
        policy_sec: Wall seconds from the previous time step to this action; `None` on FIRST, or not known.
        environment_sec: Wall seconds of the environment's `reset()` or `step()`; `None` where not known.
        container_sec: Those of them (of concurrent calls, the sum) that calls of the container took: its start and
            set-up, the agent's commands and transfers, the verifier. `None` where not known.
        commands: What the agent ran in the container, in the order in which the commands ended.
    """

    step_index: int
    step_type: StepType
    observation: Mapping[str, Any] | None
    action: Mapping[str, Any] | None
    reward: float | None
    discount: float | None
    timestamp: float
    policy_sec: float | None = None
    environment_sec: float | None = None
    container_sec: float | None = None
    commands: Sequence[CommandRecord] = ()

    def __post_init__(self) -> None:
        """Freezes what could change: the agent's later edits must not reach the record."""
        object.__setattr__(self, "observation", freeze(self.observation))
        object.__setattr__(self, "action", freeze(self.action))
        object.__setattr__(self, "commands", tuple(self.commands))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, messages in full."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["commands"] = [command_to_dict(command) for command in self.commands]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; keys of later versions are ignored.

        Raises:
            KeyError, TypeError, ValueError: A field is missing, or is not what it should be.
        """
        for name, (kinds, what) in _STEP_CHECKS.items():
            if not has_type(value := data.get(name) if name in _OPTIONAL_STEP_FIELDS else data[name], kinds):
                raise TypeError(f"expected `{name}` to be {what}, got {value!r:.80}")
        if data["step_type"] not in ("FIRST", "MID", "LAST"):
            raise ValueError(f"expected `step_type` to be FIRST, MID or LAST, got {data['step_type']!r:.80}")
        values = {item.name: data[item.name] for item in fields(cls) if item.name in data}
        values["commands"] = tuple(_command_from_dict(command) for command in data.get("commands") or ())
        return cls(**values)


_NUMBER = ((int, float), "a number")
_NUMBER_OR_NONE = ((int, float, type(None)), "a number or null")
_MAPPING_OR_NONE = ((Mapping, type(None)), "an object or null")
_STEP_CHECKS: dict[str, tuple[tuple[type, ...], str]] = {
    "step_index": ((int,), "an integer"),
    "step_type": ((str,), "a string"),
    "observation": _MAPPING_OR_NONE,
    "action": _MAPPING_OR_NONE,
    "reward": _NUMBER_OR_NONE,
    "discount": _NUMBER_OR_NONE,
    "timestamp": _NUMBER,
    "policy_sec": _NUMBER_OR_NONE,
    "environment_sec": _NUMBER_OR_NONE,
    "container_sec": _NUMBER_OR_NONE,
}
_OPTIONAL_STEP_FIELDS = frozenset({"policy_sec", "environment_sec", "container_sec", "commands"})
_EPISODE_CHECKS: dict[str, tuple[tuple[type, ...], str]] = {
    "episode_id": ((str,), "a string"),
    "task_name": ((str,), "a string"),
    "start_time": _NUMBER,
    "end_time": _NUMBER,
    "total_reward": _NUMBER_OR_NONE,
    "num_steps": ((int,), "an integer"),
    "outcome": ((str,), "a string"),
    "error": _MAPPING_OR_NONE,
}


def command_to_dict(command: CommandRecord) -> dict[str, Any]:
    """A JSON-ready dict of a command; `asdict` would cost ten times as much."""
    return {
        "command": command.command,
        "exit_code": command.exit_code,
        "duration_sec": command.duration_sec,
        "timed_out": command.timed_out,
    }


def _command_from_dict(data: Mapping[str, Any]) -> CommandRecord:
    command, exit_code, seconds = data["command"], data["exit_code"], data["duration_sec"]
    timed_out = data.get("timed_out", False)
    if not (isinstance(command, str) and has_type(seconds, (int, float)) and isinstance(timed_out, bool)):
        raise TypeError(f"expected a command with its text and seconds, got {dict(data)!r:.80}")
    if not has_type(exit_code, (int, type(None))):
        raise TypeError(f"expected `exit_code` to be an integer or null, got {exit_code!r:.80}")
    return CommandRecord(command, exit_code, seconds, timed_out)


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
        metadata: What else its recorder knew of it, JSON-ready: attempt, seed, agent, …
        unfinished_step: What is known of the reset or step that ended it by raising: the action that was being
            applied, the commands that were run for it, the seconds. `None` where nothing raised.
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
    metadata: Mapping[str, Any] = field(default_factory=Message)
    unfinished_step: StepRecord | None = None

    def __post_init__(self) -> None:
        """Freezes what could change."""
        object.__setattr__(self, "metadata", freeze(self.metadata))

    def returns_to_go(self, discount: float = 1.0) -> tuple[float | None, ...]:
        """What each step still had to gain.

        Args:
            discount: Factor per step, in [0, 1].

        Returns:
            One value per action, in order: `reward of its step + discount * the next value`; `num_steps - 1` values.
            All `None` where the episode's reward is missing: a missing reward is never 0.0.

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

    def discounted_return(self, discount: float = 1.0) -> float | None:
        """The episode's return from its first action on; `None` where its reward is missing."""
        returns = self.returns_to_go(discount)
        return returns[0] if returns else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form with the fields' names as keys, every observation's messages in full."""
        data = {item.name: getattr(self, item.name) for item in fields(self)}
        data["steps"] = [step.to_dict() for step in self.steps]
        data["error"] = asdict(self.error) if self.error is not None else None
        data["unfinished_step"] = self.unfinished_step.to_dict() if self.unfinished_step is not None else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; also takes the parsed text of a trajectory file of any version.

        Raises:
            TrajectoryFormatError: A field is missing or has the wrong form.
        """
        from ares_exp.trajectories.files.schema_versions import read_steps

        try:
            steps, values = tuple(read_steps(data)), episode_fields(data)
            if values["num_steps"] != len(steps):
                raise ValueError(f"expected {values['num_steps']} steps, got {len(steps)}")
            return cls(steps=steps, **values)
        except BROKEN as error:
            raise TrajectoryFormatError(f"Expected a trajectory: {what_broke(error)}") from error

    @classmethod
    def load(cls, path: str | Path) -> EpisodeTrajectory:
        """Reads a file that a collector of this package wrote, of any schema version, also compressed (`.zst`).

        Raises:
            TrajectoryFormatError: The file is missing, cut short, no JSON, or no trajectory; the message names the path
                and, where there is one, the place.
        """
        from ares_exp.trajectories.files.episode_file import load_episode

        return load_episode(Path(path))


def episode_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an `EpisodeTrajectory` but `steps`, checked, out of its JSON form.

    Raises:
        KeyError, TypeError, ValueError: A field is missing, or is not what it should be.
    """
    for name, (kinds, what) in _EPISODE_CHECKS.items():
        if not has_type(data[name], kinds):
            raise TypeError(f"expected `{name}` to be {what}, got {data[name]!r:.80}")
    if not isinstance(data["truncated"], bool):
        raise TypeError(f"expected `truncated` to be a boolean, got {data['truncated']!r:.80}")
    values = {name: data[name] for name in (*_EPISODE_CHECKS, "truncated")}
    values["outcome"] = Outcome(data["outcome"])
    error = data["error"]
    values["error"] = ErrorInfo(str(error["type"]), str(error["message"])) if error is not None else None
    values["metadata"] = data.get("metadata") or {}
    if not isinstance(values["metadata"], Mapping):
        raise TypeError(f"expected `metadata` to be an object, got {values['metadata']!r:.80}")
    unfinished = data.get("unfinished_step")
    values["unfinished_step"] = StepRecord.from_dict(unfinished) if unfinished is not None else None
    return values


def total_reward(steps: Sequence[StepRecord]) -> float | None:
    """Sum of the rewards of an episode that reached a LAST step with a reward; else `None`."""
    if not steps or steps[-1].step_type != "LAST" or steps[-1].reward is None:
        return None
    return sum(step.reward for step in steps if step.reward is not None)
