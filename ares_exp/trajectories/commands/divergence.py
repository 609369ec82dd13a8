"""Where two episodes part.

What counts is what was said and done: requests, replies, commands with their exit codes, rewards, discounts, and how
the episode ended. Ids (of episodes and of tool calls), times, seconds, tokens, prices, log-probabilities and the
model's name do not: two playings of the same thing have others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ares_exp.environments.activity import CommandRecord
from ares_exp.trajectories.commands.episode_printer import is_text, piece_text
from ares_exp.trajectories.commands.request_change import is_request
from ares_exp.trajectories.first_difference import Difference, first_difference
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord

MEASURED = frozenset(
    {
        "cost", "usage", "latency_sec", "model", "sampling", "logprobs", "prompt_token_ids", "completion_token_ids",
    }
)  # fmt: skip
"""What of a response does not count."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place in which two episodes differ.

    Attributes:
        step: How many steps they have in common.
        difference: What is different in the next step, or in how they ended.
    """

    step: int
    difference: Difference


def find_divergence(old: EpisodeTrajectory, new: EpisodeTrajectory) -> Divergence | None:
    """Where two episodes part; `None` where they do not."""
    same_ids = _CallNames(), _CallNames()
    for number, (was, has) in enumerate(zip_longest(old.steps, new.steps)):
        if was is None or has is None:
            counts = (f"{len(steps)} steps" for steps in (old.steps, new.steps))
            return Divergence(number, Difference("number of steps", *counts))
        if (difference := _between(was, has, *same_ids)) is not None:
            return Divergence(number, difference)
    for name, tell in _ENDS.items():
        if tell(old) != tell(new):
            return Divergence(len(old.steps), Difference(name, str(tell(old)), str(tell(new))))
    return None


_ENDS: dict[str, Callable[[EpisodeTrajectory], Any]] = {
    "task": lambda episode: episode.task_name,
    "outcome": lambda episode: episode.outcome.value,
    "total reward": lambda episode: episode.total_reward,
    "error": lambda episode: episode.error and episode.error.type,
}


def _between(was: StepRecord, has: StepRecord, old_names: _CallNames, new_names: _CallNames) -> Difference | None:
    """In the order in which things happen: the reply, what the agent did with it, what came of it."""
    if (difference := _between_actions(_said(old_names, was), _said(new_names, has))) is not None:
        return difference
    for number, (ran, runs) in enumerate(zip_longest(was.commands, has.commands)):
        if (old := _command(ran)) != (new := _command(runs)):
            return Difference(f"command {number}", old, new)
    for name in ("step_type", "reward", "discount"):
        if (before := getattr(was, name)) != (now := getattr(has, name)):
            return Difference(name, str(before), str(now))
    observed, observes = old_names.plain(was.observation), new_names.plain(has.observation)
    if is_request(observed) and is_request(observes):
        return first_difference(observed, observes)
    return None if observed == observes else Difference("observation", _text(observed), _text(observes))


def _said(names: _CallNames, step: StepRecord) -> Any:
    """What of the step's action counts."""
    return names.plain({k: v for k, v in step.action.items() if k not in MEASURED}) if step.action else step.action


def _between_actions(was: Any, has: Any) -> Difference | None:
    if was == has:
        return None
    replies = _reply(was), _reply(has)
    if None in replies or replies[0] == replies[1]:
        return Difference("reply", _text(was), _text(has))
    return Difference("reply", *replies)


def _reply(action: Any) -> str | None:
    """The text of an action, if it is nothing else."""
    pieces = action.get("data") if action else None
    if isinstance(pieces, tuple) and all(is_text(piece) for piece in pieces):
        return "".join(piece_text(piece) for piece in pieces)
    return None


def _command(command: CommandRecord | None) -> str | None:
    if command is None:
        return None
    ended = "timed out" if command.timed_out else f"exit {command.exit_code}"
    return f"{command.command}\n[{ended}]"


def _text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, indent=2)


class _CallNames:
    """Names the tool calls of one episode by the order in which they appear, so that those of two can be compared."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._plain: dict[int, tuple[Any, Any]] = {}

    def plain(self, value: Any) -> Any:
        """`value` with the names in place of the calls' ids."""
        if isinstance(value, tuple | list):
            return tuple([self.plain(item) for item in value])
        if not isinstance(value, Mapping):
            return value
        if (known := self._plain.get(id(value))) is None:  # the same message is in many requests
            known = self._plain[id(value)] = value, self._without_ids(value)
        return known[1]

    def _without_ids(self, value: Mapping[str, Any]) -> dict[str, Any]:
        is_call = isinstance(value.get("function"), Mapping) or value.keys() == {"id", "name", "arguments"}
        return {
            key: self._name(item)
            if isinstance(item, str) and (key == "tool_call_id" or (is_call and key == "id"))
            else self.plain(item)
            for key, item in value.items()
        }

    def _name(self, call_id: str) -> str:
        return self._names.setdefault(call_id, f"call {len(self._names)}")
