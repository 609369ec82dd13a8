"""The policy of an episode that can be resumed: every answer is logged, and what was answered before is given again.

So is that there was no answer in time: the stage of the task that it ended ends there again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from ares_exp.answer_log import AnswerLog, Exchange, answers
from ares_exp.containers.cancellation import in_thread
from ares_exp.errors import RefusalError, ResumeDivergedError, UnansweredError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.normalisers import BUILT_IN, make_normalisers
from ares_exp.policies.request_comparison import Match, RequestComparison
from ares_exp.trajectories.records import deserialize_llm_request, serialize_llm_request

OnDivergence = Literal["continue", "restart"]
"""What to do where the episode, played again, asks something else than it did: go on from there with the policy, or
start the attempt anew."""

_SAME = {Match.EXACT, Match.NORMALISED}


class ResumablePolicy:
    """Gives the answers of an earlier try again as long as the requests are the same; then asks the policy.

    Times, process ids and the like may differ (see `normalisers`).

    Attributes:
        given_again: Those that were, in order; those before a snapshot that was restored included.
        diverged_at: The first step whose request was another one; `None`: there was none.
    """

    def __init__(
        self,
        client: LLMClient,
        log: AnswerLog,
        *,
        earlier: Sequence[Exchange] = (),
        begin_at: int = 0,
        stage: Callable[[], int] = lambda: 0,
        paid: Callable[[LLMResponse], None] = lambda answer: None,
        on_divergence: OnDivergence = "continue",
    ) -> None:
        """Asks nobody yet.

        Args:
            client: Answers what was not answered before. If it has a place of its own, it is told of the answers that
                are given in its stead, and of those that there were not (`None`): `advance(request, answer)`.
            log: Has the earlier exchanges already, and takes the others.
            earlier: The exchanges of the earlier try.
            begin_at: How many of them were over when the snapshot was taken that the episode goes on with.
            stage: Says how many stages of the task are over.
            paid: Is told of every answer that the policy gave.
            on_divergence: What to do where a request is another one.
        """
        self._client = client
        self._log = log
        self._earlier = list(earlier)
        self._position = begin_at
        self._stage = stage
        self._paid = paid
        self._on_divergence = on_divergence
        self._comparison = RequestComparison(make_normalisers(list(BUILT_IN)))
        self._advance = getattr(client, "advance", None)
        self.given_again = answers(earlier[:begin_at])
        self.diverged_at: int | None = None
        if self._advance is not None:
            for exchange in earlier[:begin_at]:
                self._advance(deserialize_llm_request(exchange.request), exchange.answer)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Answers one request.

        Raises:
            ResumeDivergedError: It is not the one that was answered before, and the attempt is to be started anew.
            UnansweredError: There was no answer to it in time.
        """
        position = self._position
        self._position += 1
        if self.diverged_at is None and position < len(self._earlier):
            if self._earlier[position].stage > self._stage():
                await self._end_stage(request, position)
                raise UnansweredError("The stage of the task was over when it came to this request.")
            recorded, answer, _ = self._earlier[position]
            if self._comparison.compare(position, recorded, serialize_llm_request(request)).match in _SAME:
                if self._advance is not None:
                    self._advance(request, answer)
                if answer is None:
                    raise UnansweredError("There was no answer to this request in time.")
                self.given_again.append(answer)
                return answer
            self.diverged_at = position
            if self._on_divergence == "restart":
                raise ResumeDivergedError(
                    f"Played again, the episode asks something else at step {position} than it did: the attempt is "
                    "started anew (resume_diverged=restart)."
                )
            await in_thread(lambda: self._log.begin(self._earlier[:position]))
        try:
            answer = await self._client(request)
        except RefusalError as refusal:
            if refusal.answer is not None:
                self._paid(refusal.answer)
            raise
        except UnansweredError:
            self.note_unanswered(request)
            raise
        self._log.append(request, answer, stage=self._stage())
        self._paid(answer)
        return answer

    def note_unanswered(self, request: LLMRequest) -> None:
        """Logs that there was no answer to the last request before the environment's time was up."""
        is_logged = self.diverged_at is None and self._position <= len(self._earlier)
        if not is_logged:
            self._log.append(request, None, stage=self._stage())

    async def _end_stage(self, request: LLMRequest, position: int) -> None:
        """Has a stage end where it did: while its agent was at work, as its time was up, of which there is more now."""
        unasked = Exchange(serialize_llm_request(request), None, self._stage())
        self._earlier.insert(position, unasked)
        await in_thread(lambda: self._log.begin(self._earlier))
