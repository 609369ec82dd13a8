"""The line between one agent and its LLM: which of its requests are calls, and which ask for a response once more.

Clients of providers send a request again when they did not get all of the response: after a timeout, a lost
connection, a stream that ended early. What tells such a retry from a new call is not in their headers, so it is found
out here:

- While a call is pending, the same request in the same conversation waits for the same response.
- A response that was not delivered is given to the same request again. It was delivered when the whole of it was
  written and the client then ended the connection in order, or went on using it.
- A response that was delivered is given again if the client says that it retries (`x-stainless-retry-count`). If not,
  the agent asks anew, as it may, and that is a new call.

A call whose client has gone is kept until the agent asks something else in that conversation.

Agents run sub-agents, and ask for titles and summaries beside their work. If the client names the conversation in a
header, that counts. Otherwise a request belongs to the conversation that it continues: the one with the longest list
of messages that it starts with. A request that continues none starts one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from ares_exp.environment import MAIN_CONVERSATION
from ares_exp.errors import EpisodeStateError
from ares_exp.llms.canonical import Canonical, canonical
from ares_exp.llms.request import LLMClient, LLMRequest, Origin
from ares_exp.llms.response import LLMResponse
from ares_exp.records.secrets import EPISODE_KEY_PREFIX


class LineClosedError(Exception):
    """The agent gets no responses any more."""


@dataclass(eq=False, slots=True)
class Turn:
    """One LLM call of the agent.

    Attributes:
        request: What was asked.
        call: Waits for its response, which is on record when it is there.
        waiting: How many clients wait for the response, or are being given it.
        is_delivered: Whether a client has got all of it.
    """

    request: LLMRequest
    call: asyncio.Task[LLMResponse]
    waiting: int = 0
    is_delivered: bool = False

    async def respond(self, timeout_sec: float | None = None) -> LLMResponse | None:
        """Waits for the response, so long at most; `None` when it is not there by then.

        Raises:
            LineClosedError: There will be none: the agent's time is over.
        """
        await asyncio.wait({self.call}, timeout=timeout_sec)
        if not self.call.done():
            return None
        if self.call.cancelled() or isinstance(self.call.exception(), EpisodeStateError):
            raise LineClosedError
        return self.call.result()


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


KEEPALIVE_SEC = 10.0
BackgroundRequests = Literal["observe", "answer"]
"""What becomes of calls beside the agent's work: observations like any other, or answered without a step."""

RETRY_HEADER = "x-stainless-retry-count"
MAIN_KEY = "main"
"""The conversation of a request without any of the headers that name conversations."""
_FORWARDED = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "max_output_tokens": "max_output_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
}
"""Sampling parameters by their names on the wires → the field of an `LLMRequest`."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LineReport:
    """What came over a line.

    Attributes:
        requests: Requests for a response, retries included.
        retries: Those of them that asked for a response once more.
        conversations: Names of the conversations, in the order in which they started.
        dropped: What requests had that could not be carried, sorted.
        background requests: Calls that were answered beside the steps.
    """

    requests: int = 0
    retries: int = 0
    conversations: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    background_requests: int = 0


class Line:
    """The line of one episode.

    Attributes:
        key: The secret that its requests must have. Its form is masked in all records.
        keepalive_sec: After how many seconds, each time, a client that waits is sent something.
    """

    def __init__(
        self,
        llm_client: LLMClient,
        *,
        conversation_headers: Sequence[str] = (),
        forward_sampling: bool = False,
        keepalive_sec: float = KEEPALIVE_SEC,
        background_requests: BackgroundRequests = "observe",
        offers_tools: bool = False,
    ) -> None:
        """Asks nothing yet.

        Args:
            llm_client: Answers the calls.
            conversation_headers: Names of headers, lower case, whose values name conversations.
            forward_sampling: Whether calls have the agent's own sampling parameters.
            keepalive_sec: After how many seconds, each time, a client that waits is sent something.
            background_requests: Whether calls of background conversations are marked to be answered beside the steps.
            offers_tools: As of `Conversations`; matters for such calls alone.
        """
        self.keepalive_sec = keepalive_sec
        self.key = f"{EPISODE_KEY_PREFIX}{secrets.token_hex(24)}"
        self._llm_client = llm_client
        self._conversation_headers = tuple(conversation_headers)
        self._forward_sampling = forward_sampling
        self._marks_background_requests = background_requests == "answer"
        self._background_requests = 0
        self._conversations = Conversations(offers_tools=offers_tools and self._marks_background_requests)
        self._requests = 0
        self._retries = 0
        self._dropped: set[str] = set()
        self._calls: set[asyncio.Task[LLMResponse]] = set()
        self._is_closed = False

    @property
    def report(self) -> LineReport:
        """What came over it so far."""
        conversations = tuple(conversation.name for conversation in self._conversations)
        return LineReport(
            self._requests, self._retries, conversations, tuple(sorted(self._dropped)), self._background_requests
        )

    def opens_for(self, key: str | None) -> bool:
        """Returns whether `key` is the line's key, in a time that does not depend on it."""
        return hmac.compare_digest((key or "").encode(errors="replace"), self.key.encode())

    def ask(self, request: LLMRequest, headers: Mapping[str, str]) -> Turn:
        """Takes a request: makes a call of it, or finds the call that it asks for again.

        Args:
            request: With its origin, but for the conversation.
            headers: Of HTTP; their names compare without case.

        Raises:
            LineClosedError: The agent's time is over.
        """
        if self._is_closed:
            raise LineClosedError
        self._requests += 1
        asked = canonical(request)
        key = next((value for name in self._conversation_headers if (value := headers.get(name))), MAIN_KEY)
        key = key if self._conversation_headers else ""
        is_retry = headers.get(RETRY_HEADER, "0").strip() not in ("", "0")
        for conversation in self._conversations:
            turn = conversation.turns.get(asked.fingerprint) if conversation.key == key else None
            if turn is not None and (is_retry or not turn.is_delivered):
                self._retries += 1
                return turn
        conversation = self._conversations.find(request, key, asked)
        for digest, turn in list(conversation.turns.items()):
            if not turn.waiting:  # the agent has moved on, and no client waits any more
                turn.call.cancel()
                del conversation.turns[digest]
        origin = request.origin
        if origin is not None and (new := set(origin.dropped) - self._dropped):
            self._dropped |= new
            _logger.info("Left out of the agent's requests (%s): %s.", origin.wire, ", ".join(sorted(new)))
        turn = conversation.turns[asked.fingerprint] = self._call(request, conversation)
        return turn

    def _call(self, request: LLMRequest, conversation: Conversation) -> Turn:
        is_background = self._marks_background_requests and conversation.is_side
        self._background_requests += is_background
        origin = replace(request.origin or Origin(""), conversation=conversation.name, is_background=is_background)
        sampling = _sampling(origin.sampling) if self._forward_sampling else {}
        request = replace(request, origin=origin, **sampling)
        call = asyncio.get_running_loop().create_task(_answered(self._llm_client, request), name="LLM call of an agent")
        self._calls.add(call)
        call.add_done_callback(self._ended)
        return Turn(request, call)

    def _ended(self, call: asyncio.Task[LLMResponse]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # told to the waiting clients, if there are any; asyncio would report it

    async def close(self) -> None:
        """Gives up all calls. Idempotent."""
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()
        if self._calls:
            with suppress(asyncio.CancelledError):
                await asyncio.wait(self._calls)


async def _answered(llm_client: LLMClient, request: LLMRequest) -> LLMResponse:
    return await llm_client(request)


def _sampling(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an `LLMRequest` for what the agent's client asked of the engine."""
    return {_FORWARDED[name]: value for name, value in asked.items() if name in _FORWARDED and value is not None}
