"""The policy of an episode that can be resumed: logs every answer, and gives logged answers again.

So is that there was no answer in time: the stage of the task that it ended ends there again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ares_exp.asking.asked_ahead import NO_CALL, AskedAhead, concurrency_of, is_asked_ahead
from ares_exp.asking.checked_answer import checked_answer
from ares_exp.asking.episode_events import EpisodeEvents
from ares_exp.cancellation import in_thread
from ares_exp.config.parts import has_members
from ares_exp.environment import PendingRequest
from ares_exp.errors import PolicyError, RefusalError, ResumeDivergedError, UnansweredError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import AdvancingClient
from ares_exp.resume.answer_log import AnswerLog, Exchange, answers
from ares_exp.trajectories.normalisers import Normaliser
from ares_exp.trajectories.recorded_lanes import RecordedLanes
from ares_exp.trajectories.records import deserialize_llm_request, lane_of, serialize_llm_request
from ares_exp.trajectories.request_diff import Match, RequestComparison, StepComparison

OnDivergence = Literal["continue", "restart"]
"""Action when a replayed episode sends a different request: continue from there with the policy, or restart the
attempt."""

_SAME = {Match.EXACT, Match.NORMALISED}


@dataclass(slots=True)
class GivenAgain:
    """The answers of an earlier try that a policy has given again.

    Attributes:
        answers: The answers in order, including those before a restored snapshot.
        diverged_at: The first step whose request differed; `None`: all were the same.
    """

    answers: list[LLMResponse]
    diverged_at: int | None = None


class _Answered(NamedTuple):
    """An answer that is on record.

    Attributes:
        answer: The answer.
        ahead: Its number in the log, if it was asked ahead; `None`: its turn is recorded with it.
        is_taken: Whether the earlier try had asked for it.
    """

    answer: LLMResponse
    ahead: int | None
    is_taken: bool = False


class ResumablePolicy:
    """Gives the answers of an earlier try again while the requests are the same; then asks the policy.

    Times, process ids and the like may differ (see `normalisers`). The conversations of an agent are lanes, each with
    an order of its own: a request is compared with the next one of its lane. Answers that were asked ahead are logged
    when they come; those of the earlier try whose turn never came are given to the requests that they answer, in
    whatever order.

    Attributes:
        given_again: The answers given again so far.
    """

    def __init__(
        self,
        client: LLMClient,
        log: AnswerLog,
        *,
        earlier: Sequence[Exchange] = (),
        ahead: Sequence[Exchange] = (),
        begin_at: int = 0,
        events: EpisodeEvents | None = None,
        may_ask: Callable[[], Awaitable[None]] | None = None,
        on_divergence: OnDivergence = "continue",
        normalisers: Sequence[Normaliser] | None = None,
    ) -> None:
        """Advances the client past the exchanges before `begin_at`.

        Args:
            client: Answers new requests. An `AdvancingClient` is informed of the answers that are
                given instead of its own, and of missing ones.
            log: Has the earlier exchanges already, and receives the new ones.
            earlier: The exchanges of the earlier try.
            ahead: What the earlier try had asked ahead, and had not applied.
            begin_at: How many of them precede the snapshot that the episode continues from.
            events: Says how many stages of the task have ended and whether the time is up, and hears of every answer
                that is to be paid for.
            may_ask: Returns when the policy may be asked: not while the run is held.
            on_divergence: What to do where a request is another one.
            normalisers: What may differ between two requests that are the same; `None`: the built-in ones.
        """
        self._client = client
        self._log = log
        self._logged = list(earlier)
        self._recorded = RecordedLanes(earlier, used=begin_at)
        self._position = begin_at
        self._events = events or EpisodeEvents()
        self._may_ask = may_ask
        self._on_divergence = on_divergence
        self._normalisers = normalisers
        self._comparison = RequestComparison(normalisers)
        self._advance = client.advance if has_members(client, AdvancingClient) else _stay
        self._asked = AskedAhead(
            self._ask,
            concurrency=concurrency_of(client),
            has_room=self._events.has_room,
            on_wait=self._events.waited,
        )
        self._pending: Sequence[PendingRequest] = ()
        self._aside = asyncio.Lock()
        self._is_live = self._has_gone_live = False
        self._left_over = dict(enumerate(ahead))
        self.given_again = GivenAgain(answers(earlier[:begin_at]))
        for exchange in earlier[:begin_at]:
            self._advance(deserialize_llm_request(exchange.request), exchange.answer)

    @property
    def looks_ahead(self) -> bool:
        """Whether the policy may be asked for several answers at once."""
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
            PolicyError: The policy failed, or what it answered is no answer.
            ResumeDivergedError: It differs from the recorded request, and the attempt is to start from the beginning.
            UnansweredError: There was no answer to it in time.
        """
        position = self._position
        self._position += 1
        if self._recorded and (given := await self._recorded_answer(request, position)) is not None:
            return given
        self._go_live()
        return await self._answer(request)

    async def _recorded_answer(self, request: LLMRequest, position: int) -> LLMResponse | None:
        """Returns the answer of the earlier try to the same request; `None`: its lane has no more, or goes another way.

        Raises:
            ResumeDivergedError, UnansweredError: As `__call__`.
        """
        asked = serialize_llm_request(request)
        if (exchange := self._recorded.next_of(asked, self._is_same)) is None:
            return None
        if exchange.stage > self._events.num_stages:
            await self._end_stage(asked, exchange)
            raise UnansweredError("The stage of the task had ended before this request.")
        compared = self._comparison.compare(position, exchange.request, asked)
        if compared.match in _SAME:
            self._recorded.use(asked)
            self._advance(request, exchange.answer)
            if exchange.answer is None:
                raise UnansweredError("There was no answer to this request in time.")
            self._give_again(exchange.answer)
            return exchange.answer
        await self._diverge(position, asked, compared)
        return None

    async def answer_aside(self, request: LLMRequest) -> LLMResponse:
        """Answers a request that takes no step, one at a time; given again, too, if an earlier try had the answer.

        In the log such an answer is one that was asked ahead and whose turn never comes.

        Raises:
            PolicyError: The policy failed, or what it answered is no answer.
        """
        async with self._aside:
            call = PendingRequest(NO_CALL, lane_of(serialize_llm_request(request)), request)
            if (taken := self._take(call)) is not None:
                self._advance(request, taken.answer)
                if not self._has_gone_live:
                    self._give_again(taken.answer)
                return taken.answer
            answer = await self._paid_answer(request)
            self._log.append_ahead(request, answer, stage=self._events.num_stages)
            self._events.pay(answer)
            return answer

    def _is_same(self, recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
        return RequestComparison(self._normalisers).compare(0, recorded, asked).match in _SAME

    async def _diverge(self, position: int, asked: Mapping[str, Any], compared: StepComparison) -> None:
        """Notes that a lane goes another way: its later recorded answers are not used.

        Raises:
            ResumeDivergedError: The attempt is to start from the beginning.
        """
        if self.given_again.diverged_at is None:
            self.given_again.diverged_at = position
        if self._on_divergence == "restart":
            raise ResumeDivergedError(
                f"Played again, the episode asks something else at step {position} than it did: the attempt is "
                "started anew (resume_diverged=restart).",
                step=position,
                why=f"{compared.where}: {'; '.join(compared.diff)}",
            )
        forgotten = set(map(id, self._recorded.forget(asked)))
        await self._begin_log([exchange for exchange in self._logged if id(exchange) not in forgotten])

    def _go_live(self) -> None:
        """Asks the policy from now on, ahead, too, when nothing is given again any more."""
        if not self._has_gone_live:
            self._has_gone_live = True
            for answer in answers(self._left_over.values()):  # paid for, whether or not its turn comes
                self._give_again(answer)
        if not self._is_live and not self._recorded:
            self._is_live = True
            self._asked.expect(self._pending)

    def _give_again(self, answer: LLMResponse) -> None:
        self.given_again.answers.append(answer)
        self._events.usage.pay(answer)

    async def _answer(self, request: LLMRequest) -> LLMResponse:
        """Returns the answer to the observation, which is on record as the next exchange then."""
        try:
            answer, ahead, is_taken = await self._asked(request)
        except UnansweredError:
            self._note_unanswered(request)
            raise
        except PolicyError:
            raise
        except BaseException:  # usually the cancellation when the environment's time is up
            if self._events.is_time_up:
                self._note_unanswered(request)
            raise
        if ahead is not None:
            self._log.apply(ahead)
        self._note(request, answer)
        if is_taken:
            self._advance(request, answer)
        return answer

    async def _ask(self, call: PendingRequest) -> _Answered:
        """Asks the policy for one answer, in its turn or ahead; it is on record and paid for when it is returned."""
        if (taken := self._take(call)) is not None:
            return taken
        answer = await self._paid_answer(call.request)
        stage, ahead = self._events.num_stages, None
        if is_asked_ahead():
            ahead = self._log.append_ahead(call.request, answer, stage=stage)
        else:
            self._log.append(call.request, answer, stage=stage)
        self._events.pay(answer)
        return _Answered(answer, ahead)

    async def _paid_answer(self, request: LLMRequest) -> LLMResponse:
        """Asks the policy, when it may be asked. Who calls counts the answer; that of a refusal is counted here."""
        if self._may_ask is not None:
            await self._may_ask()
        try:
            return checked_answer(await self._client(request))
        except RefusalError as refusal:
            if refusal.answer is not None:
                self._events.pay(refusal.answer)
            raise

    def _take(self, call: PendingRequest) -> _Answered | None:
        """Returns the answer that the earlier try had asked ahead to this request, if there is one."""
        if not self._left_over:
            return None
        stage, request = self._events.num_stages, serialize_llm_request(call.request)
        for number, (recorded, answer, own_stage) in self._left_over.items():
            if own_stage == stage and answer is not None and self._is_same(recorded, request):
                del self._left_over[number]
                return _Answered(answer, number, is_taken=True)
        return None

    def _note_unanswered(self, request: LLMRequest) -> None:
        """Logs that the last request had no answer before the environment's time was up."""
        self._log.append(request, None, stage=self._events.num_stages)
        self._note(request, None)

    def _note(self, request: LLMRequest, answer: LLMResponse | None) -> None:
        """Remembers what the log has more than the earlier try, as long as it may have to be begun anew."""
        if self._recorded:
            self._logged.append(Exchange(serialize_llm_request(request), answer, self._events.num_stages))

    async def _end_stage(self, asked: Mapping[str, Any], next_one: Exchange) -> None:
        """Logs the end of a stage whose agent was interrupted by its time limit, before the next exchange."""
        place = next(number for number, exchange in enumerate(self._logged) if exchange is next_one)
        self._logged.insert(place, Exchange(asked, None, self._events.num_stages))
        await self._begin_log(self._logged)

    async def _begin_log(self, logged: Sequence[Exchange]) -> None:
        """Begins the log anew with other exchanges than it had."""
        self._logged = list(logged)
        ahead = list(self._left_over.values())
        await in_thread(lambda: self._log.begin(self._logged, ahead))


def _stay(request: LLMRequest, answer: LLMResponse | None) -> None:
    """Does nothing: a client without a position has none to advance."""
