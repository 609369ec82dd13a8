"""The requests of one episode: each answered in its turn, those behind it asked ahead where the policy allows that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, TypeVar, runtime_checkable
from weakref import WeakMethod

from ares_exp.cancellation import finish
from ares_exp.config.parts import has_members
from ares_exp.environment import MAIN_CONVERSATION, PendingRequest
from ares_exp.errors import EpisodeStateError, PolicyError, PolicyTimeoutError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import checked_response

T = TypeVar("T")

UNWIND_SEC = 2.0
"""How long cancelled requests may take to unwind when their episode has ended."""

NO_CALL = -1
"""Call id of an observation of which nothing more is known."""


@runtime_checkable
class ConcurrentClient(LLMClient, Protocol):
    """A client of one episode that may be asked for several responses at once: none depends on what was asked before.

    Attributes:
        max_concurrency_per_episode: Bound on requests of one episode in progress at once; 1: one after the other, in
            the order of the observations.
    """

    max_concurrency_per_episode: int


def concurrency_of(client: LLMClient) -> int:
    """Returns how many requests of one episode the client may be asked at once; 1 when it does not say."""
    return client.max_concurrency_per_episode if has_members(client, ConcurrentClient) else 1


@runtime_checkable
class ForesightedClient(LLMClient, Protocol):
    """A client of one episode that is told of requests before it is asked for their responses."""

    @property
    def looks_ahead(self) -> bool:
        """Whether it makes use of what it is told."""
        ...

    def expect(self, pending: Sequence[PendingRequest]) -> None:
        """Takes all requests that wait for a response, in their order; the first is asked for next, or is already.

        Those that are no longer among them need no response any more.
        """
        ...

    async def close(self) -> None:
        """Cancels what is running: the episode has ended. Bounded, and idempotent."""
        ...


@dataclass(slots=True, eq=False)
class _Ask:
    """A request that was asked ahead.

    Attributes:
        call: The request.
        task: Asks for its response.
        is_awaited: Whether the episode waits for it now.
        waits_until: Until when it waits for its endpoint, in seconds of the monotonic clock; 0.0: it does not.
    """

    call: PendingRequest
    task: asyncio.Task[Any] = field(init=False)
    is_awaited: bool = False
    waits_until: float = 0.0


_ahead: ContextVar[_Ask | None] = ContextVar("asked ahead", default=None)
"""The request that the running code asks ahead."""


def counted_when_awaited(on_wait: Callable[[float], None]) -> Callable[[float], None]:
    """Returns the place of `on_wait` in a policy: what requests wait counts only while the episode waits for them.

    Otherwise five requests that wait side by side would count fivefold.
    """

    def waited(seconds: float) -> None:
        ask = _ahead.get()
        if ask is None or ask.is_awaited:
            on_wait(seconds)
        else:
            ask.waits_until = max(ask.waits_until, time.monotonic() + seconds)

    return waited


class AskedAhead(Generic[T]):
    """Asks for the responses of one episode, several at once up to a bound.

    Attributes:
        awaited: Call id of the request that the episode waits for.
        looks_ahead: Whether anything is asked ahead.
    """

    def __init__(
        self,
        ask: Callable[[PendingRequest, bool], Awaitable[T]],
        *,
        concurrency: int,
        has_room: Callable[[int], bool],
        on_wait: Callable[[float], None],
    ) -> None:
        """Asks nothing yet.

        Args:
            ask: Asks the policy for one response, and is passed whether that is ahead of its turn. Raises the policy's
                errors.
            concurrency: Bound on requests in progress at once; 1: nothing is asked ahead.
            has_room: Whether the limits of the episode let so many responses be applied, and another one after them.
            on_wait: Is told of the seconds that a request, asked ahead, still waits when the episode comes to it.
        """
        self._ask = ask
        self.looks_ahead = concurrency > 1
        self._concurrency = concurrency
        self._has_room = has_room
        self._on_wait = on_wait
        self._pending: Sequence[PendingRequest] = ()
        self._asks: dict[int, _Ask] = {}
        self._ending: set[asyncio.Task[T]] = set()
        self._closed = False
        self.awaited: int | None = None

    def expect(self, pending: Sequence[PendingRequest]) -> None:
        """Cancels requests that are no longer pending, and asks ahead for those behind the first."""
        if not self.looks_ahead or self._closed:
            return
        self._pending = pending
        if self._asks:
            requests = {call.call_id: call.request for call in pending}
            for call_id, ask in list(self._asks.items()):
                if requests.get(call_id) != ask.call.request:  # another stage numbers its calls anew
                    self._cancel(self._asks.pop(call_id))
        if len(pending) > 1:
            self._ask_ahead()

    async def __call__(self, request: LLMRequest) -> T:
        """Returns the response to the observation. A request that was asked ahead is not asked again."""
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
        """Cancels what was asked ahead, and waits, bounded, for it to unwind."""
        self._closed = True
        for ask in self._asks.values():
            self._cancel(ask)
        self._asks.clear()
        self._ask = _ask_no_more  # who asks holds this object: without the circle, all is freed at once
        if self._ending:
            await finish(asyncio.wait(self._ending, timeout=UNWIND_SEC))

    def _ask_ahead(self) -> None:
        """Asks for the next responses after the first, as many as may be in progress."""
        first, *others = self._pending
        free = (
            self._concurrency
            - 1
            - sum(not ask.task.done() for call_id, ask in self._asks.items() if call_id != first.call_id)
        )
        for place, call in enumerate(others, 1):
            if call.call_id in self._asks or call.call_id == self.awaited:
                continue
            if free <= 0 or not self._has_room(place):
                return
            free -= 1
            self._asks[call.call_id] = ask = _Ask(call)
            ask.task = asyncio.create_task(self._in_background(ask), name="asked ahead")
            ask.task.add_done_callback(self._ended)

    async def _in_background(self, ask: _Ask) -> T:
        _ahead.set(ask)
        try:
            return await self._ask(ask.call, True)
        except SystemExit as error:  # it would end the event loop, and it is the policy's failure
            raise PolicyError(f"The policy raised SystemExit: {error}") from error

    def _ended(self, task: asyncio.Task[T]) -> None:
        """Makes use of the place that has become free."""
        self._ending.discard(task)
        if not task.cancelled():
            task.exception()  # raised when its turn comes, if it comes; asyncio would report it
        if len(self._pending) > 1 and not self._closed:
            self._ask_ahead()

    def _cancel(self, ask: _Ask) -> None:
        if not ask.task.done():
            self._ending.add(ask.task)
            ask.task.cancel()


async def _ask_no_more(call: PendingRequest, is_ahead: bool) -> NoReturn:
    raise EpisodeStateError("The episode has ended: its policy is asked for nothing more.")


class PaidBackgroundRequests:
    """The client of an episode without a log, which responses background requests, too."""

    def __init__(self, client: LLMClient, pay: Callable[[LLMResponse], None]) -> None:
        """Takes the client, and who counts what answers to background requests cost."""
        self.max_concurrency_per_episode = concurrency_of(client)
        self._client = client
        self._pay = pay

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """As the client."""
        return await self._client(request)

    async def respond_in_background(self, request: LLMRequest) -> LLMResponse:
        """Answers a request that takes no step.

        Raises:
            PolicyError: The policy failed, or what it answered is no response.
        """
        response = await checked_response(self._client, request)
        self._pay(response)
        return response


class BackgroundClient:
    """Who answers the background requests of an episode: known when its policy is made, which is after its environment.

    It does not keep the policy: when the episode has ended, all of it is freed at once.
    """

    def __init__(self, timeout_sec: float | None = None) -> None:
        """There is nobody yet.

        Args:
            timeout_sec: Limit on one response.
        """
        self._timeout_sec = timeout_sec
        self._responses: WeakMethod[LLMClient] | None = None

    def answered_by(self, responses: LLMClient) -> None:
        """Takes the one who answers from now on: a method of an object that somebody else keeps."""
        self._responses = WeakMethod(responses)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Answers one.

        Raises:
            PolicyError: The policy failed, or gave no response within the limit.
            EpisodeStateError: The episode has ended.
        """
        responses = self._responses() if self._responses is not None else None
        if responses is None:
            raise EpisodeStateError("The episode has ended: its policy is asked for nothing more.")
        try:
            async with asyncio.timeout(self._timeout_sec) as limit:
                return await responses(request)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise PolicyTimeoutError(
                f"The policy gave no response to a background request within its limit of {self._timeout_sec:g} s."
            ) from error
