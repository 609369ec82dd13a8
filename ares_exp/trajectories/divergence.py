"""The first difference between two recorded episodes.

The comparison includes requests, replies, commands with their exit codes, rewards, discounts, and how the episode
ended. It ignores values that differ between two runs of the same task: ids of episodes and tool calls, times,
durations, token counts, costs, log-probabilities, reasoning, and the model's name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ares_exp.containers.activity import CommandRecord
from ares_exp.records.terminal_text import count_of
from ares_exp.trajectories.episode_printer import is_text, is_thinking, piece_text
from ares_exp.trajectories.records import EpisodeTrajectory, StepRecord
from ares_exp.trajectories.request_diff import Difference, compared_messages, first_difference, is_request

MEASURED = frozenset(
    {
        "cost", "usage", "latency_sec", "model", "sampling", "policy_version", "policy_version_from", "logprobs",
        "prompt_token_ids", "completion_token_ids", "activations",
    }
)  # fmt: skip
"""Fields of a response that are not compared, because they may differ between two runs of the same task."""
MARK_CHARS = 8


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference between two episodes. `step` is the number of equal steps before the difference."""

    step: int
    difference: Difference


def find_divergence(old: EpisodeTrajectory, new: EpisodeTrajectory) -> Divergence | None:
    """Returns the first difference between two episodes; `None` if they are equal."""
    same_ids = _CallNames(), _CallNames()
    for step, (was, has) in enumerate(zip_longest(old.steps, new.steps)):
        if was is None or has is None:
            counts = (count_of(len(steps), "time step") for steps in (old.steps, new.steps))
            return Divergence(step, Difference("number of time steps", *counts))
        if (difference := _between(was, has, *same_ids)) is not None:
            return Divergence(step, difference)
    for name, tell in _ENDS.items():
        if tell(old) != tell(new):
            return Divergence(len(old.steps), Difference(name, str(tell(old)), str(tell(new))))
    return None


def step_marks(episode: EpisodeTrajectory) -> list[list[str]]:
    """Returns four short hashes for each step, which can be compared to find steps that differ.

    The hashes are for (1) the reply, (2) the commands, (3) the step type, reward and discount, and (4) the observation.
    Two hashes are equal if `find_divergence` finds no difference between these parts.
    """
    names, known, marks = _CallNames(), _Marks(), list[list[str]]()
    for step in episode.steps:
        said, observed = _said(names, step), names.plain(step.observation)
        parts = said, [_command(command) for command in step.commands], [step.step_type, step.reward, step.discount]
        marks.append([*map(_mark, parts), known.of_request(observed) if is_request(observed) else _mark(observed)])
    return marks


def _mark(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:MARK_CHARS]


class _Marks:
    """Computes digests of the requests in one episode. Caches the digest of each message."""

    def __init__(self) -> None:
        self._messages: dict[int, tuple[Any, str]] = {}

    def of_request(self, request: Mapping[str, Any]) -> str:
        rest = {name: value for name, value in request.items() if name not in ("messages", "origin")}
        marks = []
        for message in request["messages"]:
            if (found := self._messages.get(id(message))) is None:
                (counts,) = compared_messages({"messages": [message]})
                found = self._messages[id(message)] = message, _mark(counts)
            marks.append(found[1])
        return _mark([marks, rest])


_ENDS: dict[str, Callable[[EpisodeTrajectory], Any]] = {
    "task": lambda episode: episode.task_name,
    "outcome": lambda episode: episode.outcome.value,
    "total reward": lambda episode: episode.total_reward,
    "error": lambda episode: episode.error and episode.error.type,
}


def _between(was: StepRecord, has: StepRecord, old_names: _CallNames, new_names: _CallNames) -> Difference | None:
    said, says = _said(old_names, was), _said(new_names, has)
    if said != says:
        replies = _reply(said), _reply(says)
        whole = None in replies or replies[0] == replies[1]
        return Difference("reply", *((_text(said), _text(says)) if whole else replies))
    for index, (ran, runs) in enumerate(zip_longest(was.commands, has.commands)):
        if (old := _command(ran)) != (new := _command(runs)):
            return Difference(f"command {index}", old, new)
    for name in ("step_type", "reward", "discount"):
        if (before := getattr(was, name)) != (now := getattr(has, name)):
            return Difference(name, str(before), str(now))
    observed, observes = old_names.plain(was.observation), new_names.plain(has.observation)
    if is_request(observed) and is_request(observes):
        return first_difference(observed, observes)
    return None if observed == observes else Difference("observation", _text(observed), _text(observes))


def _said(names: _CallNames, step: StepRecord) -> Any:
    """Returns the action of a step without the parts that are not compared: measured values and reasoning."""
    if not step.action:
        return step.action
    said = {name: value for name, value in step.action.items() if name not in MEASURED}
    if isinstance(pieces := said.get("data"), tuple):
        said["data"] = tuple(piece for piece in pieces if not is_thinking(piece))
    return names.plain(said)


def _reply(action: Any) -> str | None:
    """Returns the text of an action that consists only of text; `None` for other actions."""
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
    """Replaces the random ids of tool calls with `call 0`, `call 1`, …, so that episodes can be compared."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._plain: dict[int, tuple[Any, Any]] = {}

    def plain(self, value: Any) -> Any:
        """Returns a copy of `value` in which the ids of tool calls are replaced."""
        if isinstance(value, tuple | list):
            return tuple([self.plain(item) for item in value])
        if not isinstance(value, Mapping):
            return value
        if (known := self._plain.get(id(value))) is None:  # the same message is in many requests
            is_call = isinstance(value.get("function"), Mapping) or value.keys() == {"id", "name", "arguments"}
            plain = {
                key: self._names.setdefault(item, f"call {len(self._names)}")
                if isinstance(item, str) and (key == "tool_call_id" or (is_call and key == "id"))
                else self.plain(item)
                for key, item in value.items()
            }
            known = self._plain[id(value)] = value, plain
        return known[1]
