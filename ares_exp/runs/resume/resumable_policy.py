"""The policy of an episode that can be resumed: logs every response, and gives logged responses again.

So is that there was no response in time: the stage of the task that it ended ends there again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ares_exp.cancellation import in_thread
from ares_exp.config.parts import has_members
from ares_exp.environment import PendingRequest
from ares_exp.errors import PolicyError, RefusalError, UnansweredError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.asked_ahead import NO_CALL, AskedAhead, concurrency_of
from ares_exp.policies.episode_events import EpisodeEvents
from ares_exp.policies.policy import AdvancingClient, checked_response
from ares_exp.trajectories.recorded_responses import Exchange, RecordedResponses, responses
from ares_exp.trajectories.records import conversation_of, deserialize_llm_request, serialize_llm_request
from ares_exp.trajectories.request_diff import Normaliser, StepComparison
from ares_exp.trajectories.response_log import ResponseLog

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GivenAgain:
    """The responses of an earlier try that a policy has given again.

    Attributes:
        responses: The responses in order, including those before a restored snapshot.
        diverged_at: The first step whose request differed; `None`: all were the same.
    """

    responses: list[LLMResponse]
    diverged_at: int | None = None


class _Answered(NamedTuple):
    """A response that is on record.

    Attributes:
        response: The response.
        ahead: Its number in the log, if it was asked ahead; `None`: its turn is recorded with it.
        is_taken: Whether the earlier try had asked for it.
    """

    response: LLMResponse
    ahead: int | None
    is_taken: bool = False


class ResumablePolicy:
    """Gives the responses of an earlier try again while the requests are the same; then asks the policy.

    Times, process ids and the like may differ (see `request_diff`). The conversations of an agent are conversations,
    each with an order of its own: a request is compared with the next one of its conversation. Responses that were
    asked ahead are logged when they come; those of the earlier try whose turn never came are given to the requests
    that they answer, in whatever order.

    Attributes:
        given_again: The responses given again so far.
    """

    def __init__(
        self,
        client: LLMClient,
        log: ResponseLog,
        *,
        earlier: Sequence[Exchange] = (),
        ahead: Sequence[Exchange] = (),
        start_at: int = 0,
        events: EpisodeEvents | None = None,
        may_ask: Callable[[], Awaitable[None]] | None = None,
        normalisers: Sequence[Normaliser] | None = None,
    ) -> None:
        """Advances the client past the exchanges before `start_at`.

        Args:
            client: Answers new requests. An `AdvancingClient` is informed of the responses that are
                given instead of its own, and of missing ones.
            log: Has the earlier exchanges already, and receives the new ones.
            earlier: The exchanges of the earlier try.
            ahead: What the earlier try had asked ahead, and had not applied.
            start_at: How many of them precede the snapshot that the episode continues from.
            events: Says how many stages of the task have ended and whether the time is up, and hears of every response
                that is to be paid for.
            may_ask: Returns when the policy may be asked: not while the run is held.
            normalisers: What may differ between two requests that are the same; `None`: the built-in ones.
        """
        self._client = client
        self._log = log
        self._logged = list(earlier)
        self._recorded = RecordedResponses(earlier, used=start_at, normalisers=normalisers)
        self._position = start_at
        self._events = events or EpisodeEvents()
        self._may_ask = may_ask
        self._advance = client.advance if has_members(client, AdvancingClient) else _stay
        self._asked = AskedAhead(
            self._ask,
            concurrency=concurrency_of(client),
            has_room=self._events.has_room,
            on_wait=self._events.waited,
        )
        self._pending: Sequence[PendingRequest] = ()
        self._background_request = asyncio.Lock()
        self._is_live = self._has_gone_live = False
        self._left_over = dict(enumerate(ahead))
        self.given_again = GivenAgain(responses(earlier[:start_at]))
        for exchange in earlier[:start_at]:
            self._advance(deserialize_llm_request(exchange.request), exchange.response)

    @property
    def looks_ahead(self) -> bool:
        """Whether the policy may be asked for several responses at once."""
        return self._asked.looks_ahead

    def expect(self, pending: Sequence[PendingRequest]) -> None:
        """As `ForesightedClient`: asks ahead, unless answers of the earlier try are still being given again."""
        self._pending = pending
        if self._is_live:
            self._asked.expect(pending)

    async def close(self) -> None:
        """Cancels what was asked ahead."""
        await self._asked.close()

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Answers one request.

        Raises:
            PolicyError: The policy failed, or what it answered is no response.
            UnansweredError: There was no response to it in time.
        """
        position = self._position
        self._position += 1
        if self._recorded and (given := await self._recorded_response(request, position)) is not None:
            return given
        if not self._is_live:
            self._go_live()
        try:
            response, ahead, is_taken = await self._asked(request)
        except PolicyError as error:
            if isinstance(error, UnansweredError):
                self._note_unanswered(request)
            raise
        except BaseException:  # usually the cancellation when the environment's time is up
            if self._events.is_time_up:
                self._note_unanswered(request)
            raise
        if ahead is not None:
            self._log.apply(ahead)
        if self._recorded:
            self._note(request, response)
        if is_taken:
            self._advance(request, response)
        return response

    async def _recorded_response(self, request: LLMRequest, position: int) -> LLMResponse | None:
        """Returns the recorded response to the same request; `None` if its conversation has no more or differs.

        Raises:
            UnansweredError: As `__call__`.
        """
        asked = serialize_llm_request(request)
        if (exchange := self._recorded.next_for(asked)) is None:
            return None
        if exchange.stage > self._events.num_stages:
            await self._end_stage(asked, exchange)
            raise UnansweredError("The stage of the task had ended before this request.")
        compared = self._recorded.compare(exchange, asked, position)
        if compared.is_same:
            self._recorded.use(asked)
            self._advance(request, exchange.response)
            if exchange.response is None:
                raise UnansweredError("There was no response to this request in time.")
            self._give_again(exchange.response)
            return exchange.response
        await self._diverge(position, asked, compared)
        return None

    async def respond_in_background(self, request: LLMRequest) -> LLMResponse:
        """Answers a request that takes no step, one at a time; given again, too, if an earlier try had the response.

        In the log such a response is one that was asked ahead and whose turn never comes.

        Raises:
            PolicyError: The policy failed, or what it answered is no response.
        """
        async with self._background_request:
            call = PendingRequest(NO_CALL, conversation_of(serialize_llm_request(request)), request)
            if (taken := self._take(call)) is not None:
                self._advance(request, taken.response)
                if not self._has_gone_live:
                    self._give_again(taken.response)
                return taken.response
            response = await self._paid_response(request)
            self._log.append_ahead(request, response, stage=self._events.num_stages)
            self._events.pay(response)
            return response

    async def _diverge(self, position: int, asked: Mapping[str, Any], compared: StepComparison) -> None:
        """Continues a conversation with the policy: its later recorded responses are not used."""
        if self.given_again.diverged_at is None:
            self.given_again.diverged_at = position
            logger.warning(
                "The resumed episode %s differs from the recorded one at step %d (%s). It continues from there with "
                "the policy.",
                self._log.episode_id,
                position,
                compared.where,
            )
        forgotten = set(map(id, self._recorded.forget(asked)))
        await self._start_log([exchange for exchange in self._logged if id(exchange) not in forgotten])

    def _go_live(self) -> None:
        """Asks the policy from now on, ahead, too, when nothing is given again any more."""
        if not self._has_gone_live:
            self._has_gone_live = True
            for response in responses(self._left_over.values()):  # paid for, whether or not its turn comes
                self._give_again(response)
        if not self._is_live and not self._recorded:
            self._is_live = True
            self._asked.expect(self._pending)

    def _give_again(self, response: LLMResponse) -> None:
        self.given_again.responses.append(response)
        self._events.usage.pay(response)

    async def _ask(self, call: PendingRequest, is_ahead: bool) -> _Answered:
        """Asks the policy for one response, which is on record and paid for when this returns."""
        if self._left_over and (taken := self._take(call)) is not None:
            return taken
        response = await self._paid_response(call.request)
        stage, ahead = self._events.num_stages, None
        if is_ahead:
            ahead = self._log.append_ahead(call.request, response, stage=stage)
        else:
            self._log.append(call.request, response, stage=stage)
        self._events.pay(response)
        return _Answered(response, ahead)

    async def _paid_response(self, request: LLMRequest) -> LLMResponse:
        """Asks the policy, when it may be asked. Who calls counts the response; that of a refusal is counted here."""
        if self._may_ask is not None:
            await self._may_ask()
        try:
            return await checked_response(self._client, request)
        except RefusalError as refusal:
            if refusal.response is not None:
                self._events.pay(refusal.response)
            raise

    def _take(self, call: PendingRequest) -> _Answered | None:
        """Returns the response that the earlier try had asked ahead to this request, if there is one."""
        stage, request = self._events.num_stages, serialize_llm_request(call.request)
        for number, earlier in self._left_over.items():
            response = earlier.response
            if response is not None and earlier.stage == stage and self._recorded.are_same(earlier.request, request):
                del self._left_over[number]
                return _Answered(response, number, is_taken=True)
        return None

    def _note_unanswered(self, request: LLMRequest) -> None:
        """Logs that the last request had no response before the environment's time was up."""
        self._log.append(request, None, stage=self._events.num_stages)
        if self._recorded:
            self._note(request, None)

    def _note(self, request: LLMRequest, response: LLMResponse | None) -> None:
        self._logged.append(Exchange(serialize_llm_request(request), response, self._events.num_stages))

    async def _end_stage(self, asked: Mapping[str, Any], next_one: Exchange) -> None:
        """Logs the end of a stage whose agent was interrupted by its time limit, before the next exchange."""
        place = next(number for number, exchange in enumerate(self._logged) if exchange is next_one)
        self._logged.insert(place, Exchange(asked, None, self._events.num_stages))
        await self._start_log(self._logged)

    async def _start_log(self, logged: Sequence[Exchange]) -> None:
        self._logged = list(logged)
        ahead = list(self._left_over.values())
        await in_thread(lambda: self._log.start(self._logged, ahead))


def _stay(request: LLMRequest, response: LLMResponse | None) -> None:
    """Does nothing: a client without a position has none to advance."""
