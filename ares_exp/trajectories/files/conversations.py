"""Conversations that share their messages, so that a trajectory grows linearly with its length.

Each request of an episode repeats the conversation so far, mostly with a few messages more. So every distinct message
is kept once, in a table, and the conversations are the nodes of a tree: a node is one message after the conversation of
its parent. A request is then one number, also where an agent leads several conversations, goes back in one, or drops
the oldest messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import is_
from typing import Any

from ares_exp.llms.request import FrozenList, freeze

EMPTY = -1
"""The node of the conversation without a message, and the parent of first messages."""

MAX_REPEATED_MESSAGES = 100_000_000  # 10,000 steps of two messages each; 0.8 GB
"""Bound on the messages of all conversations of one file, repetitions counted, when it is read."""


@dataclass(frozen=True, slots=True)
class Added:
    """What a conversation needed that was not there yet.

    Attributes:
        node: The conversation.
        messages: The same conversation, of the table's own messages: what is equal is the same object.
        new_messages: Messages not seen before; they go to the end of the table.
        new_nodes: `(parent, index of the message)` pairs; they go to the end of the nodes.
    """

    node: int
    messages: FrozenList
    new_messages: list[Mapping[str, Any]]
    new_nodes: list[tuple[int, int]]


class ConversationWriter:
    """Turns conversations into nodes, one after the other."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self._plain: list[bool] = []
        self._by_content: dict[object, int] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._given: Sequence[Mapping[str, Any]] = ()  # the previous conversation
        self._previous = FrozenList()  # the same, of the table's messages
        self._indices: list[int] = []  # of the previous conversation's messages in the table
        self._nodes: list[int] = []  # of the previous conversation's starts

    def add(self, conversation: Sequence[Mapping[str, Any]]) -> Added:
        """Returns the node of `conversation`, whose messages must never change."""
        shared = self._shared_with_previous(conversation)
        self._given = conversation
        if shared == len(self._previous) and shared == len(conversation):
            return Added(self._nodes[-1] if self._nodes else EMPTY, self._previous, [], [])
        indices, nodes = self._indices[:shared], self._nodes[:shared]
        known, first_node = len(self.messages), len(self._children)
        node = nodes[-1] if nodes else EMPTY
        new_nodes: list[tuple[int, int]] = []
        for message in islice(conversation, shared, None):
            index = self._index(message)
            step = (node, index)
            node = self._children.setdefault(step, len(self._children))
            if node >= first_node + len(new_nodes):
                new_nodes.append(step)
            indices.append(index)
            nodes.append(node)
        messages = FrozenList((*self._previous[:shared], *map(self.messages.__getitem__, indices[shared:])))
        self._previous, self._indices, self._nodes = messages, indices, nodes
        return Added(node, messages, self.messages[known:], new_nodes)

    def _shared_with_previous(self, conversation: Sequence[Mapping[str, Any]]) -> int:
        """Counts the messages that `conversation` shares with the start of the previous one."""
        if len(conversation) >= len(self._given) and all(map(is_, self._given, conversation)):
            return len(self._given)  # most agents only ever append to one list
        count = 0
        for given, old, index, new in zip(self._given, self._previous, self._indices, conversation, strict=False):
            # Equality alone would take True for 1; a message of nothing but strings has no such doubts.
            if new is not given and not (self._plain[index] and old == new):
                break
            count += 1
        return count

    def _index(self, message: Mapping[str, Any]) -> int:
        plain = all(type(value) is str for value in message.values())
        key = tuple(message.items()) if plain else json.dumps(message)
        index = self._by_content.setdefault(key, len(self.messages))
        if index == len(self.messages):
            self.messages.append(message)
            self._plain.append(plain)
        return index


class ConversationReader:
    """Turns nodes back into conversations."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self._nodes: list[tuple[int, int]] = []
        self._read = {EMPTY: FrozenList()}
        self._repeated = 0

    def extend(self, messages: Sequence[Mapping[str, Any]], nodes: Sequence[Sequence[int]]) -> None:
        """Takes what a step added.

        Raises:
            TypeError, ValueError: That is not what a `ConversationWriter` writes.
        """
        for message in messages:
            if not isinstance(message, Mapping):
                raise TypeError(f"expected a message to be an object, got {message!r:.80}")
            self.messages.append(freeze(message))
        for parent, index in nodes:
            if not (type(parent) is int and EMPTY <= parent < len(self._nodes)):
                raise ValueError(f"expected the parent of node {len(self._nodes)} to be below it, got {parent!r:.80}")
            if not (type(index) is int and 0 <= index < len(self.messages)):
                raise ValueError(f"expected a message below {len(self.messages)}, got {index!r:.80}")
            self._nodes.append((parent, index))

    def conversation(self, node: int) -> FrozenList:
        """Returns the messages of `node`.

        Raises:
            TypeError, ValueError: There is no such node, or the file's conversations are absurdly long.
        """
        if type(node) is not int or not EMPTY <= node < len(self._nodes):
            raise ValueError(f"expected a conversation below {len(self._nodes)}, got {node!r:.80}")
        at, tail = node, []
        while (started := self._read.get(at)) is None:
            at, index = self._nodes[at]
            tail.append(self.messages[index])
        messages = FrozenList((*started, *reversed(tail))) if tail else started
        self._repeated += len(messages)
        if self._repeated > MAX_REPEATED_MESSAGES:
            raise ValueError(f"expected at most {MAX_REPEATED_MESSAGES} messages in all requests together, got more")
        self._read[node] = messages
        return messages
