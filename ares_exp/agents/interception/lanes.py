"""The conversations that the requests of one agent belong to.

Agents run sub-agents, and ask for titles and summaries beside their work. Where the client names the conversation in a
header, that counts. Otherwise a request belongs to the conversation that it continues: the one with the longest list
of messages that it begins with. A request that continues none begins one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from ares_exp.agents.interception.turn import Turn
from ares_exp.environment import MAIN_LANE
from ares_exp.llms.canonical import Canonical
from ares_exp.llms.request import LLMRequest

SIDE = "side"
"""How the names of side lanes begin."""


@dataclass(eq=False, slots=True)
class Lane:
    """One conversation.

    Attributes:
        name: `"main"`, or `sub-…` or `side-…` with the beginning of its first request's fingerprint: the same
            conversations have the same names, in whatever order they begin. A side lane offers its LLM no tools,
            although the main one does.
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


class Lanes:
    """The conversations of one agent so far."""

    def __init__(self, *, offers_tools: bool = False) -> None:
        """There is none yet.

        Args:
            offers_tools: Whether the agent's work always offers its LLM tools, so that a conversation without is a side
                lane even if it is the first. Otherwise the first is the main one.
        """
        self._offers_tools = offers_tools
        self._lanes: list[Lane] = []
        self._names: set[str] = set()

    def __iter__(self) -> Iterator[Lane]:
        """Iterates over them in the order in which they began."""
        return iter(self._lanes)

    def __len__(self) -> int:
        """Counts them."""
        return len(self._lanes)

    def find(self, request: LLMRequest, key: str, asked: Canonical) -> Lane:
        """Finds the conversation of a request, which is its last one then.

        Args:
            request: The request.
            key: What the client named the conversation; empty where it names none.
            asked: Digests of the request.
        """
        if key:  # a call without tools is another lane than a conversation with tools
            named = [lane for lane in self._lanes if lane.key == key]
            fitting = [lane for lane in named if lane.has_tools <= bool(request.tools)]
            lane = _longest(fitting, asked) or _longest(named, asked) or next(iter(fitting), None)
        else:
            lane = _longest(self._lanes, asked)
        if lane is None:
            lane = Lane(self._new_name(request, asked.fingerprint), key, bool(request.tools), asked)
            self._lanes.append(lane)
        lane.last = asked
        lane.has_tools = lane.has_tools or bool(request.tools)
        return lane

    def _new_name(self, request: LLMRequest, digest: str) -> str:
        is_side = not request.tools and (self._offers_tools or any(lane.has_tools for lane in self._lanes[:1]))
        if not is_side and MAIN_LANE not in self._names:
            name = MAIN_LANE
        else:
            kind = SIDE if is_side else "sub"
            names = (f"{kind}-{digest[:6]}{f'-{number}' if number > 1 else ''}" for number in count(1))
            name = next(name for name in names if name not in self._names)
        self._names.add(name)
        return name


def _longest(lanes: Sequence[Lane], asked: Canonical) -> Lane | None:
    """Finds the lane whose last request is the longest beginning of the one that is asked."""
    longest: Lane | None = None
    for lane in lanes:
        length = len(lane.last.messages)
        if len(asked.messages) < length or (longest is not None and length <= len(longest.last.messages)):
            continue
        if length and asked.messages[length - 1] != lane.last.messages[-1]:
            continue  # one comparison is enough for most conversations: they differ in the last message
        if asked.continues(lane.last):
            longest = lane
    return longest
