"""Sending of the requests of one episode to its policy.

An agent may wait for several responses at the same time. The episode then waits for one response after the other. If
the policy allows it, the other requests are sent *ahead of time*: before the episode waits for their responses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, TypeVar, runtime_checkable
from weakref import WeakMethod

from ares_exp.cancellation import cancel_all, finish
from ares_exp.config.parts import has_members
from ares_exp.environment import MAIN_CONVERSATION, PendingRequest
from ares_exp.errors import EpisodeStateError, PolicyError, PolicyTimeoutError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import checked_response

T = TypeVar("T")

UNWIND_SEC = 2.0
"""Maximum time in seconds to wait, at the end of an episode, until its cancelled requests have ended."""

NO_CALL = -1
"""Call id for a request that was not in the last list of pending requests (`expect`)."""


@runtime_checkable
class ConcurrentClient(LLMClient, Protocol):
    """A client of one episode that can process several requests at the same time.

    Attributes:
        max_concurrency_per_episode: Maximum number of concurrent requests of one episode. With 1, requests are sent one
            after the other, in the order of the observations.
    """

    max_concurrency_per_episode: int


def concurrency_of(client: LLMClient) -> int:
    """Returns the maximum number of concurrent requests of one episode, or 1 if the client does not define it."""
    return client.max_concurrency_per_episode if has_members(client, ConcurrentClient) else 1


@runtime_checkable
class ForesightedClient(LLMClient, Protocol):
    """A client of one episode that is notified of all pending requests, so that it can send them ahead of time."""

    @property
    def looks_ahead(self) -> bool:
        """Whether the client sends requests ahead of time, and therefore needs calls of `expect`."""
        ...

    def expect(self, pending: Sequence[PendingRequest]) -> None:
        """Receives all requests that wait for a response, in order. The episode sends the first one itself.

        The agent no longer needs responses to earlier requests that are missing from `pending`.
        """
        ...

    async def close(self) -> None:
        """Cancels running requests at the end of the episode. Waits for them only for a limited time. Idempotent."""
        ...


@dataclass(slots=True, eq=False)
class _Ask:
    """A request that was sent ahead of time. `is_awaited` is set while the episode waits for its response."""

    call: PendingRequest
    task: asyncio.Task[Any] = field(init=False)
    is_awaited: bool = False
    waits_until: float = 0.0  # end of its wait for the endpoint, on the monotonic clock


_ahead: ContextVar[_Ask | None] = ContextVar("asked ahead", default=None)
"""Request that the current asyncio task sends ahead of time; `None` in tasks that send no request ahead of time."""


def counted_when_awaited(on_wait: Callable[[float], None]) -> Callable[[float], None]:
    """Wraps `on_wait`, so that the waits of a request count only while the episode awaits this request."""

    def waited(seconds: float) -> None:
        ask = _ahead.get()
        if ask is None or ask.is_awaited:
            on_wait(seconds)
        else:
            ask.waits_until = max(ask.waits_until, time.monotonic() + seconds)

    return waited


class AskedAhead(Generic[T]):
    """Sends the requests of one episode to its policy, and limits the number of concurrent requests.

    Attributes:
        awaited: Call id of the request that the episode waits for; `None` if it waits for no response.
        looks_ahead: Whether requests are sent ahead of time.
    """

    def __init__(
        self,
        ask: Callable[[PendingRequest, bool], Awaitable[T]],
        *,
        concurrency: int,
        has_room: Callable[[int], bool],
        on_wait: Callable[[float], None],
    ) -> None:
        """Stores the arguments.

        Args:
            ask: Function that requests one response from the policy, and raises the policy's errors. Its second
                argument is whether the request is sent ahead of time.
            concurrency: Maximum number of concurrent requests. With 1, no request is sent ahead of time.
            has_room: Function that returns whether the episode's limits allow more than the given number of further
                responses.
            on_wait: Callback for a request that was sent ahead of time and that its endpoint still delays when the
                episode starts to wait for the response. It receives the remaining delay in seconds.
        """
        self._ask = ask
        self.looks_ahead = concurrency > 1
        self._concurrency = concurrency
        self._has_room = has_room
        self._on_wait = on_wait
        self._pending: Sequence[PendingRequest] = ()
        self._asks: dict[int, _Ask] = {}
        self._running: set[asyncio.Task[T]] = set()
        self._closed = False
        self.awaited: int | None = None

    def expect(self, pending: Sequence[PendingRequest]) -> None:
        """Cancels requests that are no longer pending. Sends all others but the first ahead, if limits allow."""
        if not self.looks_ahead or self._closed:
            return
        self._pending = pending
        if self._asks:
            requests = {call.call_id: call.request for call in pending}
            for call_id, ask in list(self._asks.items()):
                if requests.get(call_id) != ask.call.request:  # call ids start at 0 again in each stage
                    self._asks.pop(call_id).task.cancel()
        if len(pending) > 1:
            self._ask_ahead()

    async def __call__(self, request: LLMRequest) -> T:
        """Returns the response to a request. Sends the request, unless it was already sent ahead of time."""
        call = self._pending[0] if self._pending else None
        if call is None or call.request != request:
            call = PendingRequest(NO_CALL, MAIN_CONVERSATION, request)
        self.awaited = call.call_id
        try:
            ask = self._asks.pop(call.call_id, None)
            if ask is None:
                return await self._ask(call, False)
            ask.is_awaited = True
            left_sec = ask.waits_until - time.monotonic()
            if left_sec > 0 and not ask.task.done():
                self._on_wait(left_sec)
            response: T = await ask.task
            return response
        finally:
            self.awaited = None

    async def close(self) -> None:
        """Cancels requests that were sent ahead of time, and waits up to `UNWIND_SEC` for them to end."""
        self._closed = True
        self._asks.clear()
        self._ask = _ask_no_more  # `_ask` refers to this object; breaking the cycle frees all immediately
        if self._running:
            await finish(cancel_all(*self._running, within_sec=UNWIND_SEC))

    def _ask_ahead(self) -> None:
        first, *others = self._pending
        running = sum(not ask.task.done() for call_id, ask in self._asks.items() if call_id != first.call_id)
        free = self._concurrency - 1 - running
        for place, call in enumerate(others, 1):
            if call.call_id in self._asks or call.call_id == self.awaited:
                continue
            if free <= 0 or not self._has_room(place):
                return
            free -= 1
            self._asks[call.call_id] = ask = _Ask(call)
            ask.task = asyncio.create_task(self._in_background(ask), name="asked ahead")
            self._running.add(ask.task)
            ask.task.add_done_callback(self._ended)

    async def _in_background(self, ask: _Ask) -> T:
        _ahead.set(ask)
        try:
            return await self._ask(ask.call, True)
        except SystemExit as error:  # SystemExit would end the event loop, although only the policy failed
            raise PolicyError(f"The policy raised SystemExit: {error}") from error

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, because asyncio would log an error that is never awaited
        if len(self._pending) > 1 and not self._closed:
            self._ask_ahead()


async def _ask_no_more(call: PendingRequest, is_ahead: bool) -> NoReturn:
    raise EpisodeStateError("The episode has ended, so no more requests are sent to its policy.")


class PaidBackgroundRequests:
    """A client for episodes without a response log. Counts the cost of responses to background requests with `pay`."""

    def __init__(self, client: LLMClient, pay: Callable[[LLMResponse], None]) -> None:
        """Stores the client, and the function `pay`, which receives each response to a background request."""
        self.max_concurrency_per_episode = concurrency_of(client)
        self._client = client
        self._pay = pay

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Returns the client's response to a request that is a step of the episode."""
        return await self._client(request)

    async def respond_in_background(self, request: LLMRequest) -> LLMResponse:
        """Responds to a background request, which is not a step.

        Raises:
            PolicyError: The policy failed or returned an invalid response.
        """
        response = await checked_response(self._client, request)
        self._pay(response)
        return response


class BackgroundClient:
    """The client that an environment uses for the background requests of its episode.

    The environment receives this client before the policy's client for the episode exists. `answered_by` later sets the
    method that responds. This client stores only a weak reference to that method. The memory of the episode is
    therefore freed when the episode ends.
    """

    def __init__(self, timeout_sec: float | None = None) -> None:
        """Stores the time limit for one response, in seconds."""
        self._timeout_sec = timeout_sec
        self._responses: WeakMethod[LLMClient] | None = None

    def answered_by(self, responses: LLMClient) -> None:
        """Sets the method that responds to requests. The caller must keep a reference to the method's object."""
        self._responses = WeakMethod(responses)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Responds to one background request.

        Raises:
            PolicyError: The policy failed, or did not respond within the time limit.
            EpisodeStateError: The episode has ended.
        """
        responses = self._responses() if self._responses is not None else None
        if responses is None:
            raise EpisodeStateError("The episode has ended, so no more requests are sent to its policy.")
        try:
            async with asyncio.timeout(self._timeout_sec) as limit:
                return await responses(request)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise PolicyTimeoutError(
                f"The policy did not respond to a background request within its limit of {self._timeout_sec:g} s."
            ) from error
