"""Which messages of a request an ATIF document shows already, and which are new.

The messages of a document are numbered in the order in which it shows them; a reply of the LLM counts as the message
that agents keep of it. A request is ordinary if it is the request before, the replies since then, and new messages;
another one needs its `history`: `[start, stop)` ranges of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

from ares_exp.llms.request import FrozenList, freeze
from ares_exp.trajectories.files.conversations import ConversationWriter


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the messages of a request are.

    Attributes:
        kept_reply: The message that the agent kept of the last reply, if that is where it would be.
        new: Those to be shown now, in their order.
        old: The others.
        history: The request as ranges of numbers; `None` for an ordinary one.
    """

    kept_reply: Mapping[str, Any] | None
    new: Sequence[Mapping[str, Any]]
    old: Sequence[Mapping[str, Any]]
    history: list[list[int]] | None


class ShownMessages:
    """Counts the messages of a document while it is made."""

    def __init__(self) -> None:
        """None yet."""
        self._tree = ConversationWriter()  # makes equal messages the same objects, and keeps them alive
        self._numbers: dict[int, int] = {}  # by the identity of a message
        self._count = 0
        self._previous = FrozenList()
        self._previous_numbers: list[int] = []
        self._replies: list[int] = []  # since the previous request

    def add_reply(self) -> None:
        """The document shows a reply."""
        self._replies.append(self._count)
        self._count += 1

    def place(self, request: Sequence[Mapping[str, Any]], reply: Mapping[str, Any] | None) -> Placed:
        """Takes a request whose new messages the document shows now; `reply` is the message of the reply before it."""
        messages = self._tree.add(request).messages
        begun = self._appended_to(messages, reply)
        kept_reply: Mapping[str, Any] | None = None
        if begun is None:
            numbers, new = self._look_up(messages, reply)
        else:
            if reply is not None:
                kept_reply = messages[begun - 1]
                self._numbers[id(kept_reply)] = self._replies[-1]
            new = list(messages[begun:])
            numbers = [*self._previous_numbers, *self._replies, *range(self._count, self._count + len(new))]
            self._numbers.update(zip(map(id, new), range(self._count, self._count + len(new)), strict=True))
        ordinary = [*self._previous_numbers, *self._replies, *range(self._count, self._count + len(new))]
        fresh = set(map(id, new))
        placed = Placed(
            kept_reply,
            new,
            [message for message in messages if id(message) not in fresh],
            None if numbers == ordinary else _ranges(numbers),
        )
        self._count += len(new)
        self._previous, self._previous_numbers, self._replies = messages, numbers, []
        return placed

    def _appended_to(self, messages: FrozenList, reply: Mapping[str, Any] | None) -> int | None:
        """How many messages are the request before and the reply; `None` where that is not how this one begins."""
        length = len(self._previous)
        if len(messages) < length or not all(map(is_, self._previous, messages)):
            return None
        if reply is None:
            return None if self._replies else length
        answered = len(self._replies) == 1 and len(messages) > length and messages[length].get("role") == "assistant"
        return length + 1 if answered else None

    def _look_up(
        self, messages: FrozenList, reply: Mapping[str, Any] | None
    ) -> tuple[list[int], list[Mapping[str, Any]]]:
        """The numbers of the messages, and those that were not shown yet."""
        new: list[Mapping[str, Any]] = []
        frozen_reply = freeze(reply)
        for message in messages:
            if id(message) in self._numbers:
                continue
            if reply is not None and message == frozen_reply:
                self._numbers[id(message)] = self._replies[-1]
            else:
                self._numbers[id(message)] = self._count + len(new)
                new.append(message)
        return [self._numbers[id(message)] for message in messages], new


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] = number + 1
        else:
            ranges.append([number, number + 1])
    return ranges
