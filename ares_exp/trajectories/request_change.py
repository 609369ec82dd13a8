"""Changes between the requests of one episode: to the conversation and to the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from ares_exp.trajectories.records import StepRecord, conversation_of

MAX_COMPARISONS = 4_000_000
"""Rewritten histories longer than this (removed times added messages) are shown as replaced altogether."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RequestChange:
    """How the request of a step came from an earlier one.

    Attributes:
        base: The step whose conversation is continued; `None` for the first request of its conversation.
        is_previous: Whether that is the request before this one.
        kept: How many messages at the start stayed.
        edits: What follows in order: `("-", message)` is gone, `("+", message)` new, `(" ", message)` stayed.
        settings: Name, value before and value now of the settings that changed; `None` for one that is not there.
    """

    base: int | None
    is_previous: bool
    kept: int
    edits: list[tuple[str, Message]]
    settings: list[tuple[str, Any, Any]]

    @property
    def is_rewrite(self) -> bool:
        """Whether something was removed."""
        return any(sign == "-" for sign, _ in self.edits)


def is_request(observation: Any) -> bool:
    """Returns whether an observation is a code agent's request, and not another environment's."""
    messages = observation.get("messages") if isinstance(observation, Mapping) else None
    return isinstance(messages, tuple) and all(isinstance(message, Mapping) for message in messages)


def request_change(steps: Sequence[StepRecord], number: int) -> RequestChange:
    """Finds what is new in the request of step `number`, which must have one (`is_request`)."""
    request = steps[number].observation or {}
    asked = [index for index in reversed(range(number)) if is_request(steps[index].observation)]
    settings = _changed_settings((steps[asked[0]].observation or {}) if asked else {}, request)
    in_conversation = [
        index for index in asked if conversation_of(steps[index].observation or {}) == conversation_of(request)
    ]
    if not in_conversation:
        return RequestChange(None, False, 0, [("+", message) for message in request["messages"]], settings)
    base = next(filter(partial(_continued, steps, request["messages"]), in_conversation), in_conversation[0])
    before = steps[base].observation or {}
    kept, edits = _edits(before["messages"], request["messages"])
    return RequestChange(base, base == asked[0], kept, edits, settings)


def _continued(steps: Sequence[StepRecord], messages: Sequence[Message], index: int) -> bool:
    """Returns whether `messages` start with the conversation of step `index`."""
    earlier = (steps[index].observation or {})["messages"]
    return bool(earlier) and messages[: len(earlier)] == earlier


def _edits(before: Sequence[Message], now: Sequence[Message]) -> tuple[int, list[tuple[str, Message]]]:
    kept = 0
    while kept < min(len(before), len(now)) and before[kept] == now[kept]:
        kept += 1
    old, new = before[kept:], now[kept:]
    if len(old) * len(new) > MAX_COMPARISONS or not old or not new:
        return kept, [*(("-", message) for message in old), *(("+", message) for message in new)]
    edits: list[tuple[str, Message]] = []
    matcher = SequenceMatcher(None, [json.dumps(one) for one in old], [json.dumps(one) for one in new], autojunk=False)
    for tag, old_from, old_to, new_from, new_to in matcher.get_opcodes():
        if tag == "equal":
            edits += [(" ", message) for message in new[new_from:new_to]]
        else:
            edits += [("-", message) for message in old[old_from:old_to]]
            edits += [("+", message) for message in new[new_from:new_to]]
    return kept, edits


def _changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    names = [name for name in {**now, **before} if name != "messages"]
    return [(name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)]
