"""The adapter: an environment of the `martian-ares` package as one of ours."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from ares_exp.cancellation import finish
from ares_exp.environment import (
    EnvironmentBase,
    EpisodeReport,
    LimitName,
    TimeStep,
    no_episode,
)
from ares_exp.environments.ares.conversion import request_from_ares
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse

CLOSE_TIMEOUT_SEC = 120.0
"""How long the wrapped environment may take to let go of its container."""

logger = logging.getLogger(__name__)


class AresEnvironment(EnvironmentBase):
    """Plays one task of a preset.

    What the wrapped environment raises is raised as it is: which of its parts has failed it does not say. It knows
    nothing of the limits of a run and cannot be told to verify: an episode that these end has no reward. Where it
    truncates by itself the reward is the one it gives. Rewards of MID steps are passed on; the episode's is that of its
    last step.
    """

    time_step: TimeStep[LLMRequest] | None = None
    current_task: str | None = None
    step_count = 0

    def __init__(
        self,
        task_name: str,
        *,
        make: Callable[[], Any],
        answer: Callable[[LLMResponse], Any],
        timeout_sec: float = 3600.0,
    ) -> None:
        """Keeps the options.

        Args:
            task_name: Name of the task, for the records.
            make: Makes the wrapped environment. Blocking: it may have to download the task.
            answer: Turns a response into an action of the wrapped environment.
            timeout_sec: Bound on a `reset` or a `step` of the wrapped environment.
        """
        self._make = make
        self._answer = answer
        self._timeout_sec = timeout_sec
        self._wrapped: Any = None
        self._task_name = task_name
        self.truncated_by: LimitName | None = None

    async def reset(self) -> TimeStep[LLMRequest]:  # type: ignore[override]  # neither seed nor options
        """Starts an episode; one in progress is given up.

        Raises:
            TimeoutError: It did not start within `timeout_sec`.
        """
        await self.close()
        self.step_count = 0
        self.truncated_by = self.time_step = None
        self.current_task = self._task_name
        try:
            async with self._bounded("start"):
                made = await asyncio.to_thread(self._make)
                await made.__aenter__()
                self._wrapped = made
                first = await self._wrapped.reset()
        except BaseException:
            await self.close()
            raise
        self.time_step = TimeStep("FIRST", None, None, request_from_ares(first.observation))
        return self.time_step

    async def step(self, action: LLMResponse) -> TimeStep[LLMRequest]:
        """Hands `action` on.

        Raises:
            EpisodeStateError: Before `reset()` or after LAST.
            PolicyError: The action calls a tool.
            TimeoutError: It took longer than `timeout_sec`.
        """
        if self._wrapped is None or self.time_step is None:
            raise no_episode(ended=self.time_step is not None)
        self.time_step, pending = None, self._answer(action)
        try:
            return await self._step(pending)
        except BaseException:
            await self.close()
            raise

    async def _step(self, pending: Any) -> TimeStep[LLMRequest]:
        self.step_count += 1
        async with self._bounded("take a step"):
            time_step = await self._wrapped.step(pending)
        if time_step.step_type == "LAST":
            discount = float(time_step.discount or 0.0)
            self.truncated_by = "steps" if discount else None  # the only limit that it has
            await self.close()
            self.time_step = TimeStep("LAST", _number(time_step.reward), discount, None)
            return self.time_step
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

    def report(self) -> EpisodeReport:
        """Reports task and limit; the package tells nothing about the container."""
        return EpisodeReport(task_name=self.current_task, truncated_by=self.truncated_by)

    async def close(self) -> None:
        """Closes the wrapped environment, whatever happens to the caller meanwhile. Idempotent."""
        wrapped, self._wrapped = self._wrapped, None
        if self.time_step is not None and not self.time_step.last():
            self.time_step = None
        if wrapped is not None:
            await finish(_leave(wrapped))


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
    """Converts a reward, perhaps one of numpy's, into a plain number."""
    return None if value is None else float(value)
