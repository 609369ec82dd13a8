"""The line between one agent and its LLM: which of its requests are calls, and which ask for an answer once more.

Clients of providers send a request again when they did not get all of the answer: after a timeout, a lost connection, a
stream that ended early. What tells such a retry from a new call is not in their headers, so it is found out here:

- While a call is pending, the same request in the same conversation waits for the same answer.
- An answer that was not delivered is given to the same request again. It was delivered when the whole of it was
  written and the client then ended the connection in order, or went on using it.
- An answer that was delivered is given again if the client says that it retries (`x-stainless-retry-count`). If not,
  the agent asks anew, as it may, and that is a new call.

A call whose client has gone is kept until the agent asks something else in that conversation.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from ares_exp.agents.interception.agent_conversations import Conversation, Conversations
from ares_exp.agents.interception.turn import LineClosedError, Turn
from ares_exp.llms.canonical import canonical
from ares_exp.llms.request import LLMClient, LLMRequest, Origin
from ares_exp.llms.response import LLMResponse
from ares_exp.records.secrets import EPISODE_KEY_PREFIX

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
        requests: Requests for an answer, retries included.
        retries: Those of them that asked for an answer once more.
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
