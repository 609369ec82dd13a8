"""The policy of an episode that can be resumed: it logs every response, and replays the responses in the log.

The log also contains requests that got no response within a time limit. If this limit ended a stage of the task, a
replay ends the stage at the same request.
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
    """The responses from an earlier episode that a policy has replayed.

    `responses` includes responses from before a restored snapshot. `diverged_at` is the first step whose request
    differs from the recorded request; `None` if no request differs.
    """

    responses: list[LLMResponse]
    diverged_at: int | None = None


class _Answered(NamedTuple):
    response: LLMResponse
    ahead: int | None  # number in the response log, if it was requested ahead of time
    is_taken: bool = False  # whether the earlier episode requested the response


class ResumablePolicy:
    """Replays the responses from an earlier episode as long as the agent sends the same requests, then uses the policy.

    Two requests count as the same even if times, process ids and similar values in them differ (see `request_diff`). An
    agent can have several conversations. A request is compared with the next recorded request of its own conversation.

    Responses that are requested ahead of time are logged when they arrive. If the earlier episode did not use one
    of its responses, the response is replayed when the agent sends the same request, even at another step.

    Attributes:
        given_again: The responses that were replayed so far.
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
        """Creates the policy of an episode.

        `earlier` contains the logged exchanges (requests with responses) of the earlier episode. The first `start_at`
        exchanges are skipped, because they are already part of the restored snapshot. `ahead` contains exchanges that
        the earlier episode requested ahead of time and did not use. If the client is an `AdvancingClient`, it is
        notified of replayed exchanges. `may_ask` waits until requests to the policy are allowed, for example until the
        end of a pause.
        """
        self._client = client
        self._log = log
        self._logged = list(earlier)
        self._recorded = RecordedResponses(earlier, used=start_at, normalisers=normalisers)
        self._position = start_at
        self._events = events or EpisodeEvents()
        self._may_ask = may_ask
        self._advance: Callable[[LLMRequest, LLMResponse | None], None]
        self._advance = client.advance if has_members(client, AdvancingClient) else lambda *_: None
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
        """Whether responses can be requested ahead of time, because the policy accepts concurrent requests."""
        return self._asked.looks_ahead

    def expect(self, pending: Sequence[PendingRequest]) -> None:
        """Sends pending requests ahead of time (see `ForesightedClient`), unless responses are still being replayed."""
        self._pending = pending
        if self._is_live:
            self._asked.expect(pending)

    async def close(self) -> None:
        """Cancels requests that were sent ahead of time."""
        await self._asked.close()

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Returns the recorded response to a request. If there is none, requests a response from the policy.

        Raises:
            PolicyError: The policy failed, or returned an invalid response.
            UnansweredError: In the earlier episode, a time limit expired before the response arrived, or the stage
                ended before this request.
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
        except BaseException:  # usually a cancellation because of the environment's time limit
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
        """Returns the recorded response to `request`, or `None` if the policy must respond.

        The policy must respond if the request differs from the recorded one, or if its conversation has no more
        recorded requests.
        """
        asked = serialize_llm_request(request)
        if (exchange := self._recorded.next_for(asked)) is None:
            return None
        if exchange.stage > self._events.num_stages:
            await self._end_stage(asked, exchange)
            raise UnansweredError("The stage of the task ended before this request.")
        compared = self._recorded.compare(exchange, asked, position)
        if compared.is_same:
            self._recorded.use(asked)
            self._advance(request, exchange.response)
            if exchange.response is None:
                raise UnansweredError("The policy did not respond to this request in time.")
            self._give_again(exchange.response)
            return exchange.response
        await self._diverge(position, asked, compared)
        return None

    async def respond_in_background(self, request: LLMRequest) -> LLMResponse:
        """Responds to background requests of the agent, one at a time.

        If the earlier episode got a response to the same request, replays it. Otherwise, uses the policy. The log does
        not count such a response as the response of a step.
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
        """Makes a conversation use the policy from now on, and discards its remaining recorded responses."""
        if self.given_again.diverged_at is None:
            self.given_again.diverged_at = position
            logger.warning(
                "The resumed episode %s differs from the recorded one at step %d (%s). From this step on, the "
                "policy responds instead of the recording.",
                self._log.episode_id,
                position,
                compared.where,
            )
        forgotten = set(map(id, self._recorded.forget(asked)))
        await self._start_log([exchange for exchange in self._logged if id(exchange) not in forgotten])

    def _go_live(self) -> None:
        """Starts to use the policy. Allows requests ahead of time if no conversation has recorded responses left."""
        if not self._has_gone_live:
            self._has_gone_live = True
            for response in responses(self._left_over.values()):  # paid for, even if never used
                self._give_again(response)
        if not self._is_live and not self._recorded:
            self._is_live = True
            self._asked.expect(self._pending)

    def _give_again(self, response: LLMResponse) -> None:
        self.given_again.responses.append(response)
        self._events.usage.pay(response)

    async def _ask(self, call: PendingRequest, is_ahead: bool) -> _Answered:
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
        """Waits until the run allows requests, and requests a response from the policy.

        The caller counts the cost of the response. If the policy refuses, the caller gets only an error, so this
        method counts the cost.
        """
        if self._may_ask is not None:
            await self._may_ask()
        try:
            return await checked_response(self._client, request)
        except RefusalError as refusal:
            if refusal.response is not None:
                self._events.pay(refusal.response)
            raise

    def _take(self, call: PendingRequest) -> _Answered | None:
        """Returns a response to this request that the earlier episode got ahead of time and did not use, if any."""
        stage, request = self._events.num_stages, serialize_llm_request(call.request)
        for number, earlier in self._left_over.items():
            response = earlier.response
            if response is not None and earlier.stage == stage and self._recorded.are_same(earlier.request, request):
                del self._left_over[number]
                return _Answered(response, number, is_taken=True)
        return None

    def _note_unanswered(self, request: LLMRequest) -> None:
        self._log.append(request, None, stage=self._events.num_stages)
        if self._recorded:
            self._note(request, None)

    def _note(self, request: LLMRequest, response: LLMResponse | None) -> None:
        self._logged.append(Exchange(serialize_llm_request(request), response, self._events.num_stages))

    async def _end_stage(self, asked: Mapping[str, Any], next_one: Exchange) -> None:
        """Logs the request `asked` before the exchange `next_one`, without a response, because the stage has ended."""
        place = next(number for number, exchange in enumerate(self._logged) if exchange is next_one)
        self._logged.insert(place, Exchange(asked, None, self._events.num_stages))
        await self._start_log(self._logged)

    async def _start_log(self, logged: Sequence[Exchange]) -> None:
        self._logged = list(logged)
        ahead = list(self._left_over.values())
        await in_thread(lambda: self._log.start(self._logged, ahead))
