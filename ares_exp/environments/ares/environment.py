"""The adapter: an environment of the `martian-ares` package as one of ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from ares_exp.containers.cancellation import finish
from ares_exp.environments.ares.conversion import request_from_ares
from ares_exp.environments.deadline import Deadline, DeadlinePassedError
from ares_exp.environments.episode_limits import EpisodeLimits, LimitName
from ares_exp.environments.time_step import TimeStep, truncation
from ares_exp.errors import EpisodeStateError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse

CLOSE_TIMEOUT_SEC = 120.0
"""How long the wrapped environment may take to let go of its container."""

logger = logging.getLogger(__name__)


class AresEnvironment:
    """Plays one task of a preset.

    What the wrapped environment raises is raised as it is: which of its parts has failed it does not say. A limit of
    the run truncates the episode without a reward, since it cannot be told to verify then: such an attempt is not
    scored, as with `verify_on_truncation=false`. Where it truncates by itself the reward is the one it gives. Rewards
    of MID steps are passed on; the episode's is that of its last step.
    """

    has_container = False  # one that this package knows of

    def __init__(
        self,
        task_name: str,
        *,
        make: Callable[[], Any],
        answer: Callable[[LLMResponse], Any],
        limits: EpisodeLimits | None = None,
        timeout_sec: float = 3600.0,
    ) -> None:
        """Makes nothing yet.

        Args:
            task_name: What is played, for the records.
            make: Makes the wrapped environment. Blocking: it may have to download the task.
            answer: Turns a response into an action of the wrapped environment.
            limits: When an episode is truncated besides.
            timeout_sec: Bound on a `reset` or a `step` of the wrapped environment.
        """
        self._make = make
        self._answer = answer
        self._limits = limits or EpisodeLimits()
        self._timeout_sec = timeout_sec
        self._wrapped: Any = None
        self._deadline = Deadline(None)
        self._tokens, self._cost = 0, 0.0
        self.current_task = task_name
        self.step_count = 0
        self.truncated_by: LimitName | None = None
        self.time_step: TimeStep[LLMRequest] | None = None

    async def reset(self) -> TimeStep[LLMRequest]:
        """Starts an episode; one under way is given up.

        Raises:
            TimeoutError: It did not start within `timeout_sec`.
        """
        await self.close()
        self.step_count, self._tokens, self._cost = 0, 0, 0.0
        self.truncated_by = self.time_step = None
        try:
            async with self._bounded("start"):
                made = await asyncio.to_thread(self._make)
                await made.__aenter__()
                self._wrapped = made
                first = await self._wrapped.reset()
        except BaseException:
            await self.close()
            raise
        self._deadline = Deadline(self._limits.time.agent(None))
        self.time_step = TimeStep("FIRST", None, None, request_from_ares(first.observation))
        return self.time_step

    async def step(self, action: LLMResponse | None) -> TimeStep[LLMRequest]:
        """Hands `action` on; `None` says that there was none before `time_left_sec` had passed.

        Raises:
            EpisodeStateError: Before `reset()` or after LAST.
            PolicyError: The action calls a tool.
            TimeoutError: It took longer than `timeout_sec`.
        """
        if self._wrapped is None or self.time_step is None:
            state = "has ended its episode" if self.time_step is not None else "has not been reset"
            raise EpisodeStateError(f"step() on an environment that {state}: call reset() first.")
        if action is None or self._deadline.left_sec == 0:
            return await self._cut_short("time")
        self.time_step, pending = None, self._answer(action)
        try:
            return await self._step(pending, action)
        except BaseException:
            await self.close()
            raise

    async def _step(self, pending: Any, action: LLMResponse) -> TimeStep[LLMRequest]:
        self.step_count += 1
        self._tokens += action.usage.total_tokens
        self._cost += action.cost
        try:
            async with self._deadline.hold(), self._bounded("take a step"):
                time_step = await self._wrapped.step(pending)
        except DeadlinePassedError:
            return await self._cut_short("time")
        if time_step.step_type == "LAST":
            discount = float(time_step.discount or 0.0)
            self.truncated_by = "steps" if discount else None  # the only limit that it has
            return await self._end(TimeStep("LAST", _number(time_step.reward), discount, None))
        limit = self._limits.reached(steps=self.step_count, tokens=self._tokens, cost=self._cost)
        if limit is not None:
            return await self._cut_short(limit)
        reward = _number(time_step.reward) or 0.0
        self.time_step = TimeStep("MID", reward, 1.0, request_from_ares(time_step.observation))
        return self.time_step

    @asynccontextmanager
    async def _bounded(self, what: str) -> AsyncIterator[None]:
        timer = asyncio.timeout(self._timeout_sec)
        try:
            async with timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            raise TimeoutError(
                f"The environment of martian-ares did not {what} within env.timeout_sec={self._timeout_sec:g}."
            ) from None

    async def _cut_short(self, limit: LimitName) -> TimeStep[LLMRequest]:
        self.truncated_by = limit
        return await self._end(truncation(None))

    async def _end(self, last: TimeStep[LLMRequest]) -> TimeStep[LLMRequest]:
        await self.close()
        self.time_step = last
        return last

    @property
    def time_left_sec(self) -> float | None:
        """Seconds that the time limit leaves; `None` without a limit, or with no episode under way."""
        return self._deadline.left_sec if self._wrapped is not None else None

    def grant_time(self, seconds: float) -> None:
        """Moves the time limit by what was spent on something else than the episode."""
        self._deadline.move(seconds)

    async def close(self) -> None:
        """Closes the wrapped environment, whatever happens to the caller meanwhile. Idempotent."""
        wrapped, self._wrapped = self._wrapped, None
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None
        if wrapped is not None:
            await finish(_leave(wrapped))

    async def __aenter__(self) -> Self:
        """Returns the environment itself."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment."""
        await self.close()


async def _leave(wrapped: Any) -> None:
    try:
        await asyncio.wait_for(wrapped.__aexit__(None, None, None), CLOSE_TIMEOUT_SEC)
    except Exception as error:
        logger.warning(
            "An environment of martian-ares could not be closed, and may have left its container behind: %s: %s",
            type(error).__name__,
            error,
        )


def _number(value: Any) -> float | None:
    """A reward as a plain number: it may be one of numpy's."""
    return None if value is None else float(value)
