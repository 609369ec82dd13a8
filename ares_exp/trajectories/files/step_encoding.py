"""The compact format of steps in files. Data that an earlier step of the file contains is not stored again.

An encoded step is a JSON object with the fields of `StepRecord`, without fields that have their default value. Some
fields have another form:

- `observation`: in a request, the number `conversation` replaces `messages`, and the number `settings` replaces all
  other fields except `metadata`. Equal settings are stored once, because agents rarely change them.
- `action`: a text that equals the content of a message is replaced with the number of the message, as in
  `{"content_of": 7}`. If `prompt_token_ids` start with tokens (prompt and completion) of an earlier step's action, they
  are stored as `{"step": 3, "keep": 120, "add": […]}`: the first 120 tokens of step 3, followed by the new tokens.
- `adds`: the new `messages`, `nodes` and `settings` of this step. They are appended to the lists from earlier steps.
  The `conversation` of a request is the number of a node, or -1 if it is empty (see `ConversationWriter`).
- An observation or action that could be mistaken for one of these forms is stored as `{"verbatim": …}`.

A step can be decoded only after all earlier steps.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import islice
from operator import is_
from typing import Any

from ares_exp.llms.request import FrozenList, Message, freeze
from ares_exp.trajectories.records import StepRecord

EMPTY = -1
"""Number of the empty conversation. It is the parent node of every conversation that has only one message."""

MAX_REPEATED_MESSAGES = 100_000_000  # 10,000 steps of two messages each; 0.8 GB
"""Maximum number of messages in all conversations of a file together. A message counts once for each conversation that
contains it. The limit protects readers from small files that expand to very large conversations."""


@dataclass(frozen=True, slots=True)
class Added:
    """The result of adding a conversation to a `ConversationWriter`.

    `node` is the number of the conversation, and `messages` are its messages, in which equal messages are the same
    object. `new_messages` and `new_nodes` must be appended to the stored lists. Each new node is a pair: the parent
    node, and the index of a message.
    """

    node: int
    messages: FrozenList
    new_messages: list[Mapping[str, Any]]
    new_nodes: list[tuple[int, int]]


class ConversationWriter:
    """Stores conversations as a tree, so that messages which they have in common are stored once.

    Each request of an episode repeats the conversation so far, usually with a few more messages. Every distinct message
    is stored in a table. A node of the tree stands for a whole conversation: the conversation of its parent node,
    followed by one more message. The size of a trajectory then grows linearly with its length, even if the agent has
    several conversations or drops old messages.
    """

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self._plain: list[bool] = []
        self._by_content: dict[object, int] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._given: Sequence[Mapping[str, Any]] = ()  # the previous conversation
        self._previous = FrozenList()  # the previous conversation, made of messages of the table
        self._indices: list[int] = []  # table indices of the previous conversation's messages
        self._nodes: list[int] = []  # nodes of the prefixes of the previous conversation

    def add(self, conversation: Sequence[Mapping[str, Any]]) -> Added:
        """Adds a conversation, which must not change later. Returns its node, and the new messages and nodes."""
        shared = self._shared_with_previous(conversation)
        self._given = conversation
        indices, nodes = self._indices[:shared], self._nodes[:shared]
        known = len(self.messages)
        node = nodes[-1] if nodes else EMPTY
        new_nodes: list[tuple[int, int]] = []
        for message in islice(conversation, shared, None):
            plain = all(type(value) is str for value in message.values())
            key = tuple(message.items()) if plain else json.dumps(message)
            index = self._by_content.setdefault(key, len(self.messages))
            if index == len(self.messages):
                self.messages.append(message)
                self._plain.append(plain)
            step = (node, index)
            if step not in self._children:
                new_nodes.append(step)
            node = self._children.setdefault(step, len(self._children))
            indices.append(index)
            nodes.append(node)
        messages = FrozenList((*self._previous[:shared], *map(self.messages.__getitem__, indices[shared:])))
        self._previous, self._indices, self._nodes = messages, indices, nodes
        return Added(node, messages, self.messages[known:], new_nodes)

    def _shared_with_previous(self, conversation: Sequence[Mapping[str, Any]]) -> int:
        """Returns how many messages `conversation` and the previously added conversation share at their start."""
        if len(conversation) >= len(self._given) and all(map(is_, self._given, conversation)):
            return len(self._given)  # the fast path for agents that only append to a list
        count = 0
        for given, old, index, new in zip(self._given, self._previous, self._indices, conversation, strict=False):
            # Plain equality would treat True as 1. Messages that contain only strings do not have this problem.
            if new is not given and not (self._plain[index] and old == new):
                break
            count += 1
        return count


class ConversationReader:
    """Reads the conversations that a `ConversationWriter` stored."""

    def __init__(self) -> None:
        self.messages: list[Mapping[str, Any]] = []
        self._nodes: list[tuple[int, int]] = []
        self._read = {EMPTY: FrozenList()}
        self._repeated = 0

    def extend(self, messages: Sequence[Mapping[str, Any]], nodes: Sequence[Sequence[int]]) -> None:
        """Adds the messages and nodes that a step adds. Raises `TypeError` or `ValueError` if they are invalid."""
        for message in messages:
            if not isinstance(message, Mapping):
                raise TypeError(f"expected a message to be an object, got {message!r:.80}")
            self.messages.append(freeze(message))
        for parent, index in nodes:
            if not (type(parent) is int and EMPTY <= parent < len(self._nodes)):
                raise ValueError(
                    f"expected the parent of node {len(self._nodes)} to be an earlier node, got {parent!r:.80}"
                )
            if not (type(index) is int and 0 <= index < len(self.messages)):
                raise ValueError(f"expected a message index below {len(self.messages)}, got {index!r:.80}")
            self._nodes.append((parent, index))

    def conversation(self, node: int) -> FrozenList:
        """Returns the messages of `node`. Raises `ValueError` for a missing node, or above `MAX_REPEATED_MESSAGES`."""
        if type(node) is not int or not EMPTY <= node < len(self._nodes):
            raise ValueError(f"expected a conversation number below {len(self._nodes)}, got {node!r:.80}")
        at, tail = node, []
        while (started := self._read.get(at)) is None:
            at, index = self._nodes[at]
            tail.append(self.messages[index])
        messages = FrozenList((*started, *reversed(tail))) if tail else started
        self._repeated += len(messages)
        if self._repeated > MAX_REPEATED_MESSAGES:
            raise ValueError(f"all requests together exceed the limit of {MAX_REPEATED_MESSAGES} messages")
        self._read[node] = messages
        return messages


MIN_SHARED_CHARS = 32
MIN_SHARED_TOKENS = 16
REMEMBERED_TOKEN_LISTS = 4
MAX_REPEATED_TOKENS = 200_000_000
"""Maximum number of token ids in all prompts of a file together. An id counts once for each prompt that contains it."""


_OPTIONAL = frozenset(item.name for item in fields(StepRecord) if item.default is not MISSING)


class StepEncoder:
    """Converts the steps of one episode, in order, to the format of files."""

    def __init__(self) -> None:
        self._conversations = ConversationWriter()
        self._settings: dict[object, int] = {}
        self._last_settings: tuple[dict[str, Any], int] = ({}, 0)
        self._tokens: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=REMEMBERED_TOKEN_LISTS)
        self._count = 0

    def encode(self, record: StepRecord) -> tuple[StepRecord, dict[str, Any]]:
        """Converts a step to a dict for a file. Returns a step and this dict.

        The returned step equals `record`, but shares message objects with earlier steps to save memory.
        """
        observation, packed = self.pack(record.observation, record.action)
        if observation is not record.observation:
            record = replace(record, observation=observation)
        data = record.to_dict() | packed
        return record, {name: value for name, value in data.items() if name not in _OPTIONAL or value not in (None, [])}

    def pack(self, observation: Any, action: Any) -> tuple[Any, dict[str, Any]]:
        """Encodes only the observation and the action of the next step.

        Returns the observation, which shares message objects with earlier observations, and a dict with the keys
        `observation`, `action` and, if needed, `adds`.
        """
        adds: dict[str, Any] = {}
        shared, packed = self._pack_observation(observation, adds)
        data = {"observation": packed, "action": self._pack_action(action, adds)}
        self._count += 1
        return shared, {**data, "adds": adds} if adds else data

    def _pack_observation(self, observation: Any, adds: dict[str, Any]) -> tuple[Any, Any]:
        messages = observation.get("messages") if isinstance(observation, Mapping) else None
        if not isinstance(messages, FrozenList) or not {Message}.issuperset(map(type, messages)):
            return observation, _unmistakable(observation, "conversation")
        added = self._conversations.add(messages)
        packed: dict[str, Any] = {"conversation": added.node}
        if added.new_nodes:
            adds["nodes"] = added.new_nodes
        if added.new_messages:
            adds["messages"] = added.new_messages
        settings = {name: value for name, value in observation.items() if name not in ("messages", "metadata")}
        last, number = self._last_settings
        if settings and not ([*last] == [*settings] and all(map(is_, last.values(), settings.values()))):
            plain = all(type(value) is str for value in settings.values())
            key = tuple(settings.items()) if plain else json.dumps(settings)
            if key not in self._settings:
                adds["settings"] = [settings]
            number = self._settings.setdefault(key, len(self._settings))
            self._last_settings = settings, number
        if settings:
            packed["settings"] = number
        if "metadata" in observation:
            packed["metadata"] = observation["metadata"]
        if not all(map(is_, added.messages, messages)):
            observation = Message({**observation, "messages": added.messages})
        return observation, packed

    def _pack_action(self, action: Any, adds: Mapping[str, Any]) -> Any:
        pieces: Any = action.get("data") if isinstance(action, Mapping) else None
        tokens: Any = action.get("prompt_token_ids") if isinstance(action, Mapping) else None
        is_response = isinstance(pieces, FrozenList) and not isinstance(tokens, Mapping) and "verbatim" not in action
        if not is_response or any(type(piece) is Message and "content_of" in piece for piece in pieces):
            return _unmistakable(action, "data", "prompt_token_ids")
        new = adds.get("messages", ())
        contents = enumerate((message.get("content") for message in new), len(self._conversations.messages) - len(new))
        texts = {text: number for number, text in contents if type(text) is str and len(text) >= MIN_SHARED_CHARS}
        packed = {**action, "data": list(pieces)}
        for place, piece in enumerate(pieces if texts else ()):
            text = piece["content"] if type(piece) is Message and piece.keys() == {"content"} else None
            if type(text) is str and text in texts:
                packed["data"][place] = {"content_of": texts[text]}
        if tokens is not None and _are_ids(tokens):
            best, keep = 0, 0
            for position, earlier in reversed(self._tokens):
                if (common := _common_length(earlier, tokens)) > keep:
                    best, keep = position, common
            if keep >= MIN_SHARED_TOKENS:
                packed["prompt_token_ids"] = {"step": best, "keep": keep, "add": tokens[keep:]}
            generated = action.get("completion_token_ids")
            self._tokens.append((self._count, (*tokens, *(generated if _are_ids(generated) else ()))))
        return packed


class StepDecoder:
    """Converts the steps of one episode, in order, from the format of files."""

    def __init__(self) -> None:
        self._conversations = ConversationReader()
        self._settings: list[Mapping[str, Any]] = []
        self._actions: list[Any] = []
        self._repeated_tokens = 0

    def decode(self, data: Mapping[str, Any]) -> StepRecord:
        """Converts the dict of a step back to a record.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The data is not an encoded step, or it refers to entries
                that no earlier step has added.
        """
        observation, action = self.unpack(data)
        return StepRecord.from_dict({**data, "observation": observation, "action": action})

    def unpack(self, data: Mapping[str, Any]) -> tuple[Any, Any]:
        """Decodes the observation and action in a dict of `StepEncoder.pack`. Raises the same errors as `decode`."""
        adds = data.get("adds", {})
        self._conversations.extend(adds.get("messages", ()), adds.get("nodes", ()))
        self._settings.extend(adds.get("settings", ()))
        observation, action = self._observation(data["observation"]), self._action(data["action"])
        self._actions.append(action)
        return observation, action

    def _observation(self, packed: Any) -> Any:
        if not isinstance(packed, Mapping) or not packed.keys() & {"verbatim", "conversation"}:
            return packed
        if "verbatim" in packed:
            return packed["verbatim"]
        observation: dict[str, Any] = {"messages": self._conversations.conversation(packed["conversation"])}
        if "settings" in packed:
            observation |= _item(self._settings, packed["settings"], "settings")
        if "metadata" in packed:
            observation["metadata"] = packed["metadata"]
        return observation

    def _action(self, packed: Any) -> Any:
        if not isinstance(packed, Mapping):
            return packed
        if "verbatim" in packed:
            return packed["verbatim"]
        if not isinstance(packed.get("data"), list):
            return packed
        known = self._conversations.messages
        pieces = [
            {"content": _item(known, piece["content_of"], "messages")["content"]}
            if isinstance(piece, Mapping) and "content_of" in piece
            else piece
            for piece in packed["data"]
        ]
        action = {**packed, "data": pieces}
        if isinstance(tokens := packed.get("prompt_token_ids"), Mapping):
            action["prompt_token_ids"] = self._tokens(tokens)
        return action

    def _tokens(self, packed: Mapping[str, Any]) -> list[int]:
        earlier = _item(self._actions, packed["step"], "actions")
        generated = earlier.get("completion_token_ids")
        known = (*earlier["prompt_token_ids"], *(generated if isinstance(generated, list) else ()))
        if type(packed["keep"]) is not int or not 0 <= packed["keep"] <= len(known):
            raise ValueError(f"expected `keep` to be at most {len(known)}, got {packed['keep']!r:.80}")
        tokens = [*known[: packed["keep"]], *packed["add"]]
        self._repeated_tokens += len(tokens)
        if self._repeated_tokens > MAX_REPEATED_TOKENS:
            raise ValueError(f"all prompts together exceed the limit of {MAX_REPEATED_TOKENS} token ids")
        return tokens


def _unmistakable(value: Any, *reserved: str) -> Any:
    mistakable = isinstance(value, Mapping) and any(name in value for name in ("verbatim", *reserved))
    return {"verbatim": value} if mistakable else value


def _are_ids(tokens: Any) -> bool:
    """Returns whether all tokens have exactly the type `int`. Values that only equal 1 (`1.0`, `True`) are rejected."""
    return isinstance(tokens, FrozenList) and {int}.issuperset(map(type, tokens))


def _common_length(earlier: tuple[int, ...], later: tuple[int, ...]) -> int:
    """Returns how many tokens at the start of two lists are equal. Uses bisection, because comparing slices is fast."""
    low, high = 0, min(len(earlier), len(later))
    while low < high:
        middle = (low + high + 1) // 2
        if earlier[low:middle] == later[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _item(items: Sequence[Any], index: Any, what: str) -> Any:
    if type(index) is not int or not 0 <= index < len(items):
        raise ValueError(f"expected an index of the {what} below {len(items)}, got {index!r:.80}")
    return items[index]
