"""The conversations that the requests of one agent belong to.

Agents run sub-agents, and ask for titles and summaries beside their work. Where the client names the conversation in a
header, that counts. Otherwise a request belongs to the conversation that it continues: the one with the longest list
of messages that it starts with. A request that continues none starts one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from ares_exp.agents.interception.turn import Turn
from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.llms.canonical import Canonical
from ares_exp.llms.request import LLMRequest

SIDE = "side"
"""How the names of background conversations start."""


@dataclass(eq=False, slots=True)
class Conversation:
    """One conversation.

    Attributes:
        name: `"main"`, or `sub-…` or `side-…` with the start of its first request's fingerprint: the same
            conversations have the same names, in whatever order they start. A background conversation offers its LLM
            no tools, although the main one does.
        key: What the client named it; empty where it names none.
        has_tools: Whether its requests offer tools.
        last: Digests of its last request.
        turns: Its last calls, by the fingerprints of their requests.
    """

    name: str
    key: str
    has_tools: bool
    last: Canonical
    turns: dict[str, Turn] = field(default_factory=dict)

    @property
    def is_side(self) -> bool:
        """Whether it is beside the work: a title, a summary, a check of a quota."""
        return self.name.startswith(f"{SIDE}-")


class Conversations:
    """The conversations of one agent so far."""

    def __init__(self, *, offers_tools: bool = False) -> None:
        """There is none yet.

        Args:
            offers_tools: Whether the agent's work always offers its LLM tools, so that a conversation without is a side
                conversation even if it is the first. Otherwise the first is the main one.
        """
        self._offers_tools = offers_tools
        self._conversations: list[Conversation] = []
        self._names: set[str] = set()

    def __iter__(self) -> Iterator[Conversation]:
        """Iterates over them in the order in which they started."""
        return iter(self._conversations)

    def __len__(self) -> int:
        """Counts them."""
        return len(self._conversations)

    def find(self, request: LLMRequest, key: str, asked: Canonical) -> Conversation:
        """Finds the conversation of a request, which is its last one then.

        Args:
            request: The request.
            key: What the client named the conversation; empty where it names none.
            asked: Digests of the request.
        """
        if key:  # a call without tools is another conversation than a conversation with tools
            named = [conversation for conversation in self._conversations if conversation.key == key]
            fitting = [conversation for conversation in named if conversation.has_tools <= bool(request.tools)]
            conversation = _longest(fitting, asked) or _longest(named, asked) or next(iter(fitting), None)
        else:
            conversation = _longest(self._conversations, asked)
        if conversation is None:
            conversation = Conversation(self._new_name(request, asked.fingerprint), key, bool(request.tools), asked)
            self._conversations.append(conversation)
        conversation.last = asked
        conversation.has_tools = conversation.has_tools or bool(request.tools)
        return conversation

    def _new_name(self, request: LLMRequest, digest: str) -> str:
        is_side = not request.tools and (
            self._offers_tools or any(conversation.has_tools for conversation in self._conversations[:1])
        )
        if not is_side and MAIN_CONVERSATION not in self._names:
            name = MAIN_CONVERSATION
        else:
            kind = SIDE if is_side else "sub"
            names = (f"{kind}-{digest[:6]}{f'-{number}' if number > 1 else ''}" for number in count(1))
            name = next(name for name in names if name not in self._names)
        self._names.add(name)
        return name


def _longest(conversations: Sequence[Conversation], asked: Canonical) -> Conversation | None:
    """Finds the conversation whose last request is the longest start of the one that is asked."""
    longest: Conversation | None = None
    for conversation in conversations:
        length = len(conversation.last.messages)
        if len(asked.messages) < length or (longest is not None and length <= len(longest.last.messages)):
            continue
        if length and asked.messages[length - 1] != conversation.last.messages[-1]:
            continue  # one comparison is enough for most conversations: they differ in the last message
        if asked.continues(conversation.last):
            longest = conversation
    return longest
