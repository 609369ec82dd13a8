"""The line: the connection between one agent and its LLM. It detects retries, and assigns requests to conversations.

LLM clients repeat a request if they did not get the complete response, for example after a timeout or a lost
connection. The headers do not always identify a retry, so the line applies these rules:

- While a call is pending, the same request in the same conversation waits for the same response.
- If a response was not delivered, the same request gets the same response. A response is delivered if it was written
  completely and the client then closed the connection properly or continued to use it.
- If a response was delivered, the same request gets the same response only if the client marks the request as a retry
  (`x-stainless-retry-count`). Otherwise the request is a new call.

If all clients of a call disconnect, the call is kept for a retry. It is cancelled when the agent sends another request
in the same conversation.

An agent may have several conversations, because it runs subagents, or requests titles and summaries. The line assigns
each request to a conversation:

- If the client names the conversation in a header, the header decides.
- Otherwise, a request belongs to the conversation that it continues: its messages start with the messages of that
  conversation's last request. If several conversations match, the longest one counts.
- A request without tools also continues a conversation without tools if it repeats the last response. Programs such as
  aider rewrite their earlier messages, so these messages may differ.
- Any other request starts a new conversation.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal

from ares_exp.environment import BACKGROUND_PREFIX, MAIN_CONVERSATION
from ares_exp.errors import EpisodeStateError
from ares_exp.llms.canonical import Canonical, canonical
from ares_exp.llms.chat_messages import text_of
from ares_exp.llms.request import LLMClient, LLMRequest, Origin
from ares_exp.llms.response import LLMResponse
from ares_exp.records.results import AgentFacts
from ares_exp.records.secrets import EPISODE_KEY_PREFIX


class LineClosedError(Exception):
    """The line is closed or the episode has ended, so the agent gets no more responses."""


@dataclass(eq=False, slots=True)
class Turn:
    """One LLM call from the agent. Several HTTP requests may wait for its response if the client retries.

    Attributes:
        call: Task whose result is the response. The response is recorded before the task ends.
        waiting: Number of clients that wait for the response or are receiving it.
        is_delivered: Whether a client has received the complete response.
    """

    call: asyncio.Task[LLMResponse]
    waiting: int = 0
    is_delivered: bool = False

    async def respond(self, timeout_sec: float | None = None) -> LLMResponse | None:
        """Waits for the response for at most `timeout_sec` seconds. Returns `None` after the timeout.

        Raises:
            LineClosedError: The line was closed or the episode has ended, so there will be no response.
        """
        await asyncio.wait({self.call}, timeout=timeout_sec)
        if not self.call.done():
            return None
        if self.call.cancelled() or isinstance(self.call.exception(), EpisodeStateError):
            raise LineClosedError
        return self.call.result()


@dataclass(eq=False, slots=True)
class Conversation:
    """One conversation of an agent.

    Attributes:
        name: `main` for the first conversation that offers the LLM tools; `sub-…` for later ones, such as subagents;
            `side-…` for a background conversation, which offers no tools. `…` is the start of the first request's
            fingerprint (digest), so the name does not depend on the order in which conversations start. If no request
            of an episode offers tools, the records name the first conversation `main`.
        key: Value of the header that identifies the conversation. `MAIN_KEY` if the agent has such a header, but these
            requests lack it; empty if no such header is known for the agent.
        has_tools: Whether any request of the conversation offers tools.
        last: Digests of the conversation's last request.
        turns: Calls that may be retried, by the fingerprints of their requests.
    """

    name: str
    key: str
    has_tools: bool
    last: Canonical
    turns: dict[str, Turn] = field(default_factory=dict)

    def is_repeated_by(self, request: LLMRequest) -> bool:
        """Returns whether `request` repeats this conversation's last response, and neither of them has tools."""
        turn = self.turns.get(self.last.fingerprint)
        if self.has_tools or request.tools or turn is None or not turn.call.done() or turn.call.cancelled():
            return False
        said = turn.call.result().text.strip() if turn.call.exception() is None else ""
        messages = [message for message in request.messages if message["role"] == "assistant"]
        return bool(said) and any(text_of(message.get("content")).strip() == said for message in messages)


def _longest(conversations: Sequence[Conversation], asked: Canonical) -> Conversation | None:
    """Returns the longest conversation that a request continues (see the module), or `None`."""
    longest: Conversation | None = None
    for conversation in conversations:
        length = len(conversation.last.messages)
        if len(asked.messages) < length or (longest is not None and length <= len(longest.last.messages)):
            continue
        if length and asked.messages[length - 1] != conversation.last.messages[-1]:
            continue  # most conversations differ in the last message, so one comparison is enough
        if asked.continues(conversation.last):
            longest = conversation
    return longest


KEEPALIVE_SEC = 10.0
BackgroundRequests = Literal["observe", "answer"]
"""Whether a background request is an observation (`observe`) or gets a response without a step (`answer`)."""

RETRY_HEADER = "x-stainless-retry-count"
MAIN_KEY = "main"
"""Conversation key of requests that lack the header for the conversation's identity; see `Conversation.key`."""
_FORWARDED = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "max_output_tokens": "max_output_tokens",
    "maxOutputTokens": "max_output_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "topP": "top_p",
    "top_k": "top_k",
    "topK": "top_k",
}
"""Names of sampling parameters in the wire formats (keys), and the equivalent fields of `LLMRequest` (values)."""

_logger = logging.getLogger(__name__)


class Line:
    """The connection between the agent of one episode and its LLM client.

    Attributes:
        key: Random API key that every HTTP request of the agent has to contain. It is masked in all records.
        keepalive_sec: Interval in seconds between keepalives to a waiting client.
    """

    def __init__(
        self,
        llm_client: LLMClient,
        *,
        conversation_headers: Sequence[str] = (),
        forward_sampling: bool = False,
        keepalive_sec: float = KEEPALIVE_SEC,
        background_requests: BackgroundRequests = "observe",
    ) -> None:
        """Creates a line without calls.

        Args:
            llm_client: Client that responds to the calls.
            conversation_headers: Lower-case names of the headers whose values identify conversations.
            forward_sampling: Whether calls include the agent's own sampling parameters.
            keepalive_sec: Interval in seconds between keepalives to a waiting client.
            background_requests: With `answer`, calls of background conversations are marked, so that the policy
                responds to them without a step.
        """
        self.keepalive_sec = keepalive_sec
        self.key = f"{EPISODE_KEY_PREFIX}{secrets.token_hex(24)}"
        self._llm_client = llm_client
        self._conversation_headers = tuple(conversation_headers)
        self._forward_sampling = forward_sampling
        self._marks_background_requests = background_requests == "answer"
        self._conversations: list[Conversation] = []
        self._facts = AgentFacts("")
        self._calls: set[asyncio.Task[LLMResponse]] = set()
        self._is_closed = False

    @property
    def report(self) -> AgentFacts:
        """Facts about the requests so far. The caller has to fill in the name of the agent."""
        conversations = tuple(conversation.name for conversation in self._conversations)
        if MAIN_CONVERSATION not in conversations:  # no request offers tools, so the first conversation is the main one
            conversations = (MAIN_CONVERSATION,)[: len(conversations)] + conversations[1:]
        return replace(self._facts, conversations=conversations)

    def opens_for(self, key: str | None) -> bool:
        """Returns whether `key` is the line's key. The duration of the comparison reveals nothing about the key."""
        return hmac.compare_digest((key or "").encode(errors="replace"), self.key.encode())

    def refuse(self, reason: str) -> None:
        """Counts a rejected HTTP request, and logs the first rejection. `reason` must not contain the key."""
        if not self._facts.refused:
            _logger.warning("Rejected a request of the agent: %s", reason)
        self._facts += AgentFacts("", refused=1, last_refusal=reason)

    def ask(self, request: LLMRequest, headers: Mapping[str, str]) -> Turn:
        """Starts a call for a request, or returns the existing call if the request is a retry.

        The names of `headers` are case-insensitive.

        Raises:
            LineClosedError: The line is closed.
        """
        if self._is_closed:
            raise LineClosedError
        self._facts += AgentFacts("", requests=1)
        asked = canonical(request)
        key = next((value for name in self._conversation_headers if (value := headers.get(name))), MAIN_KEY)
        key = key if self._conversation_headers else ""
        is_retry = headers.get(RETRY_HEADER, "0").strip() not in ("", "0")
        for conversation in self._conversations:
            turn = conversation.turns.get(asked.fingerprint) if conversation.key == key else None
            if turn is not None and (is_retry or not turn.is_delivered):
                self._facts += AgentFacts("", retries=1)
                return turn
        conversation = self._conversation_of(request, key, asked)
        for digest, turn in list(conversation.turns.items()):
            if not turn.waiting:  # the agent has continued, and no client waits for this call
                turn.call.cancel()
                del conversation.turns[digest]
        origin = request.origin
        if origin is not None and (new := set(origin.dropped).difference(self._facts.dropped)):
            self._facts += AgentFacts("", dropped=tuple(new))
            _logger.info("Left out of the agent's requests (API format %s): %s.", origin.wire, ", ".join(sorted(new)))
        turn = conversation.turns[asked.fingerprint] = self._call(request, conversation)
        return turn

    def _conversation_of(self, request: LLMRequest, key: str, asked: Canonical) -> Conversation:
        """Returns the conversation to which a request belongs, after starting a new one if necessary.

        `key` identifies the conversation, as in `Conversation.key`. `asked` contains the digests of the request, which
        are stored as `Conversation.last`.
        """
        if key:  # one name may have two conversations: with tools, and without
            named = [conversation for conversation in self._conversations if conversation.key == key]
            fitting = [conversation for conversation in named if conversation.has_tools == bool(request.tools)]
            conversation = _longest(fitting, asked) or _longest(named, asked) or next(iter(fitting), None)
        else:
            repeated = (one for one in self._conversations if one.is_repeated_by(request))
            conversation = _longest(self._conversations, asked) or next(repeated, None)
        if conversation is None:
            taken = {one.name for one in self._conversations}
            name = MAIN_CONVERSATION
            if not request.tools or name in taken:
                prefix = "sub-" if request.tools else BACKGROUND_PREFIX
                names = (f"{prefix}{asked.fingerprint[:6]}{f'-{number}' if number > 1 else ''}" for number in count(1))
                name = next(name for name in names if name not in taken)
            conversation = Conversation(name, key, bool(request.tools), asked)
            self._conversations.append(conversation)
        conversation.last = asked
        conversation.has_tools = conversation.has_tools or bool(request.tools)
        return conversation

    def _call(self, request: LLMRequest, conversation: Conversation) -> Turn:
        is_side = conversation.name.startswith(BACKGROUND_PREFIX) and not request.tools
        is_background = self._marks_background_requests and is_side
        self._facts += AgentFacts("", background_requests=int(is_background))
        origin = replace(request.origin or Origin(""), conversation=conversation.name, is_background=is_background)
        asked = origin.sampling if self._forward_sampling else {}
        sampling = {
            _FORWARDED[name]: value for name, value in asked.items() if name in _FORWARDED and value is not None
        }
        request = replace(request, origin=origin, **sampling)
        call = asyncio.get_running_loop().create_task(self._llm_client(request), name="LLM call of an agent")
        self._calls.add(call)
        call.add_done_callback(self._ended)
        return Turn(call)

    def _ended(self, call: asyncio.Task[LLMResponse]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # waiting clients get the error; this line stops asyncio from also logging it

    async def close(self) -> None:
        """Cancels all calls, and rejects later calls. May be called several times."""
        self._is_closed = True
        for call in list(self._calls):
            call.cancel()
        if self._calls:
            with suppress(asyncio.CancelledError):
                await asyncio.wait(self._calls)
