"""Background requests of an agent, to which the policy responds without a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakMethod

from ares_exp.errors import EpisodeStateError, PolicyTimeoutError
from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.asked_ahead import concurrency_of
from ares_exp.policies.checked_answer import checked_answer


class PaidBackgroundRequests:
    """The client of an episode without a log, which answers background requests, too."""

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
            PolicyError: The policy failed, or what it answered is no answer.
        """
        answer = checked_answer(await self._client(request))
        self._pay(answer)
        return answer


class BackgroundClient:
    """Who answers the background requests of an episode: known when its policy is made, which is after its environment.

    It does not keep the policy: when the episode has ended, all of it is freed at once.
    """

    def __init__(self, timeout_sec: float | None = None) -> None:
        """There is nobody yet.

        Args:
            timeout_sec: Limit on one answer.
        """
        self._timeout_sec = timeout_sec
        self._answers: WeakMethod[LLMClient] | None = None

    def answered_by(self, answers: LLMClient) -> None:
        """Takes the one who answers from now on: a method of an object that somebody else keeps."""
        self._answers = WeakMethod(answers)

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Answers one.

        Raises:
            PolicyError: The policy failed, or gave no answer within the limit.
            EpisodeStateError: The episode has ended.
        """
        answers = self._answers() if self._answers is not None else None
        if answers is None:
            raise EpisodeStateError("The episode has ended: its policy is asked for nothing more.")
        try:
            async with asyncio.timeout(self._timeout_sec) as limit:
                return await answers(request)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise PolicyTimeoutError(
                f"The policy gave no answer to a background request within its limit of {self._timeout_sec:g} s."
            ) from error
