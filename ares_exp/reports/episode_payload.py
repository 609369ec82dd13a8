"""The payload of an episode, which is the JSON data that its page shows: steps, messages, commands, times and files.

A step contains only the differences between its request and an earlier request, and each message is stored once.
Strings are not shortened, because the page does this. Times are seconds since the episode started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.trajectories.divergence import step_marks
from ares_exp.trajectories.episode_printer import (
    as_text,
    asked_in,
    is_text,
    is_thinking,
    message_text,
    piece_text,
)
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord, command_to_dict, conversation_of
from ares_exp.trajectories.request_diff import is_request, request_change

NOT_SHOWN = ("origin", "metadata")
"""Fields of a request that the payload omits, because they are not settings of the model."""
TOLD_OF_REPLIES = ("finish_reason", "model", "policy_version", "cost", "latency_sec")


def episode_payload(
    trajectory: EpisodeTrajectory,
    *,
    is_running: bool = False,
    files: Sequence[Mapping[str, Any]] = (),
    changes: Mapping[int, Any] | None = None,
) -> dict[str, Any]:
    """Creates the payload of an episode. `files` is the result of `episode_files`, and `changes` of `file_changes`."""
    steps = _Steps(trajectory)
    unfinished = trajectory.unfinished_step
    return {
        "id": trajectory.episode_id,
        "task": trajectory.task_name,
        "outcome": None if is_running else trajectory.outcome.value,
        "reward": trajectory.total_reward,
        "rewards": trajectory.rewards,
        "error": trajectory.error.to_dict() if trajectory.error is not None and not is_running else None,
        "started": trajectory.start_time,
        "seconds": trajectory.end_time - trajectory.start_time,
        "metadata": {key: as_text(value) for key, value in trajectory.metadata.items()},
        "steps": [steps.shown(position) for position in range(len(trajectory.steps))],
        "unfinished": None if unfinished is None else steps.done(unfinished),
        "messages": steps.messages,
        "marks": step_marks(trajectory),
        "files": list(files),
        "changes": {str(step): told for step, told in (changes or {}).items()},
    }


class _Steps:
    """Creates the payloads of steps. Steps refer to messages by index in the list `messages`."""

    def __init__(self, trajectory: EpisodeTrajectory) -> None:
        self._trajectory = trajectory
        self.messages: list[dict[str, Any]] = []
        self._numbers: dict[int, int] = {}

    def shown(self, position: int) -> dict[str, Any]:
        step = self._trajectory.steps[position]
        data = self.done(step)
        observation = step.observation
        if is_request(observation):
            data |= self._request(position)
            if (conversation := conversation_of(observation or {})) not in (MAIN_CONVERSATION, ""):
                data["conversation"] = conversation
        elif observation is not None:
            data["observation"] = as_text(observation, indent=2)
        return data

    def done(self, step: StepRecord) -> dict[str, Any]:
        """Returns the data of a step except for its request: rewards, times, the policy's response, and commands."""
        numbers = {
            "reward": step.reward,
            "discount": step.discount,
            "policy_sec": step.policy_sec,
            "environment_sec": step.environment_sec,
            "container_sec": step.container_sec,
        }
        data: dict[str, Any] = {
            "index": step.step_index,
            "type": step.step_type,
            "at": round(step.timestamp - self._trajectory.start_time, 3),
            **{name: value for name, value in numbers.items() if value is not None},
        }
        if step.action is not None:
            data["reply"] = _reply(step.action)
        if step.commands:
            data["commands"] = [command_to_dict(command) for command in step.commands]
        if step.background_requests:
            data["background_requests"] = [
                {"conversation": conversation_of(one.request), "asked": asked_in(one), "reply": _reply(one.response)}
                for one in step.background_requests
            ]
        return data

    def _request(self, position: int) -> dict[str, Any]:
        steps = self._trajectory.steps
        change, action = request_change(steps, position), steps[position].action or {}
        pieces = action.get("data", ())
        reply = "".join(piece_text(piece) for piece in pieces if is_text(piece)) if isinstance(pieces, tuple) else ""
        data: dict[str, Any] = {"edits": [self._edit(sign, message, reply) for sign, message in change.edits]}
        if change.kept:
            data["kept"] = change.kept
        if change.base is not None and not change.is_previous:
            data["base"] = change.base
        settings = [one for one in change.settings if one[0] not in NOT_SHOWN and any(one[1:])]
        if settings:
            data["settings"] = [
                [name, *(None if value is None else as_text(value) for value in values)] for name, *values in settings
            ]
        return data

    def _edit(self, sign: str, message: Mapping[str, Any], reply: str) -> list[Any]:
        is_reply = (
            sign == "+" and bool(reply) and message.get("role") == "assistant" and message.get("content") == reply
        )
        return ["=" if is_reply else sign, self._number(message)]

    def _number(self, message: Mapping[str, Any]) -> int:
        number = self._numbers.setdefault(id(message), len(self.messages))
        if number == len(self.messages):
            self.messages.append({"role": str(message.get("role")), "text": message_text(message)})
        return number


def _reply(action: Mapping[str, Any]) -> dict[str, Any]:
    usage, pieces = action.get("usage"), action.get("data")
    told: dict[str, Any] = {name: action[name] for name in TOLD_OF_REPLIES if action.get(name) is not None}
    told["usage"] = dict(usage) if isinstance(usage, Mapping) else {}
    told["pieces"] = [_piece(piece) for piece in pieces] if isinstance(pieces, tuple) else [_piece(action)]
    return told


def _piece(piece: Any) -> dict[str, Any]:
    if is_text(piece):
        return {"kind": "text", "text": piece_text(piece)}
    if is_thinking(piece):
        return {"kind": "reasoning", "text": piece_text(piece)}
    if isinstance(piece, Mapping) and piece.keys() == {"id", "name", "arguments"}:
        return {"kind": "call", "name": as_text(piece["name"]), "text": as_text(piece["arguments"], indent=2)}
    return {"kind": "data", "text": as_text(piece, indent=2)}
