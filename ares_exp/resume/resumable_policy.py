"""The policy of an episode that can be resumed: logs every answer, and gives logged answers again.

So is that there was no answer in time: the stage of the task that it ended ends there again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ares_exp.asking.checked_answer import checked_answer
from ares_exp.cancellation import in_thread
from ares_exp.errors import PolicyError, RefusalError, ResumeDivergedError, UnansweredError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import AdvancingClient
from ares_exp.resume.answer_log import AnswerLog, Exchange, answers
from ares_exp.rollout import EpisodeEvents
from ares_exp.trajectories.records import deserialize_llm_request, serialize_llm_request
from ares_exp.trajectories.request_diff import Match, RequestComparison

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


class ResumablePolicy:
    """Gives the answers of an earlier try again while the requests are the same; then asks the policy.

    Times, process ids and the like may differ (see `normalisers`).

    Attributes:
        given_again: The answers given again so far.
    """

    def __init__(
        self,
        client: LLMClient,
        log: AnswerLog,
        *,
        earlier: Sequence[Exchange] = (),
        begin_at: int = 0,
        events: EpisodeEvents | None = None,
        on_divergence: OnDivergence = "continue",
    ) -> None:
        """Advances the client past the exchanges before `begin_at`.

        Args:
            client: Answers new requests. An `AdvancingClient` is informed of the answers that are
                given instead of its own, and of missing ones.
            log: Has the earlier exchanges already, and receives the new ones.
            earlier: The exchanges of the earlier try.
            begin_at: How many of them precede the snapshot that the episode continues from.
            events: Says how many stages of the task have ended and whether the time is up, and hears of every answer
                that is to be paid for.
            on_divergence: What to do where a request is another one.
        """
        self._client = client
        self._log = log
        self._earlier = list(earlier)
        self._position = begin_at
        self._events = events or EpisodeEvents()
        self._on_divergence = on_divergence
        self._comparison = RequestComparison()
        self._advance = client.advance if isinstance(client, AdvancingClient) else _stay
        self.given_again = GivenAgain(answers(earlier[:begin_at]))
        for exchange in earlier[:begin_at]:
            self._advance(deserialize_llm_request(exchange.request), exchange.answer)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Answers one request.

        Raises:
            PolicyError: The policy failed, or what it answered is no answer.
            ResumeDivergedError: It differs from the recorded request, and the attempt is to start from the beginning.
            UnansweredError: There was no answer to it in time.
        """
        position = self._position
        self._position += 1
        if self.given_again.diverged_at is None and position < len(self._earlier):
            if self._earlier[position].stage > self._events.num_stages:
                await self._end_stage(request, position)
                raise UnansweredError("The stage of the task had ended before this request.")
            recorded, answer, _ = self._earlier[position]
            compared = self._comparison.compare(position, recorded, serialize_llm_request(request))
            if compared.match in _SAME:
                self._advance(request, answer)
                if answer is None:
                    raise UnansweredError("There was no answer to this request in time.")
                self.given_again.answers.append(answer)
                return answer
            self.given_again.diverged_at = position
            if self._on_divergence == "restart":
                raise ResumeDivergedError(
                    f"Played again, the episode asks something else at step {position} than it did: the attempt is "
                    "started anew (resume_diverged=restart).",
                    step=position,
                    why=f"{compared.where}: {'; '.join(compared.diff)}",
                )
            await in_thread(lambda: self._log.begin(self._earlier[:position]))
        try:
            answer = checked_answer(await self._client(request))
        except RefusalError as refusal:
            if refusal.answer is not None:
                self._events.paid(refusal.answer)
            raise
        except UnansweredError:
            self._note_unanswered(request)
            raise
        except PolicyError:
            raise
        except BaseException:  # usually the cancellation when the environment's time is up
            if self._events.is_time_up:
                self._note_unanswered(request)
            raise
        self._log.append(request, answer, stage=self._events.num_stages)
        self._events.paid(answer)
        return answer

    def _note_unanswered(self, request: LLMRequest) -> None:
        """Logs that the last request had no answer before the environment's time was up."""
        is_logged = self.given_again.diverged_at is None and self._position <= len(self._earlier)
        if not is_logged:
            self._log.append(request, None, stage=self._events.num_stages)

    async def _end_stage(self, request: LLMRequest, position: int) -> None:
        """Logs the end of a stage whose agent was interrupted by its time limit."""
        unasked = Exchange(serialize_llm_request(request), None, self._events.num_stages)
        self._earlier.insert(position, unasked)
        await in_thread(lambda: self._log.begin(self._earlier))


def _stay(request: LLMRequest, answer: LLMResponse | None) -> None:
    """Does nothing: a client without a position has none to advance."""
