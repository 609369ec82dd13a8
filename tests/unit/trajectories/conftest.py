from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ares_exp.environment import EpisodeReport, TimeStep, restart, termination, transition, truncation
from ares_exp.llms.request import LLMRequest


class CountingEnvironment:
    """Ends after `length` steps; can fail, hang or be truncated on the way."""

    def __init__(
        self, length: int = 2, *, truncate: bool = False, fail: BaseException | None = None, name: str = "count"
    ) -> None:
        self.length, self.truncate, self.fail = length, truncate, fail
        self.name = name
        self.messages: list[dict[str, Any]] = []
        self.hang = asyncio.Event()
        self.hanging = False
        self.closed = 0

    def _observe(self) -> LLMRequest:
        self.messages.append({"role": "user", "content": f"message {len(self.messages)}"})
        return LLMRequest(self.messages)

    async def reset(self) -> TimeStep[LLMRequest]:
        self.steps = 0
        self.messages = []
        await self._trouble()
        return restart(self._observe())

    async def step(self, action: Any) -> TimeStep[LLMRequest]:
        self.steps += 1
        await self._trouble()
        if self.steps < self.length:
            return transition(self._observe())
        return truncation(0.5) if self.truncate else termination(1.0)

    def report(self) -> EpisodeReport:
        return EpisodeReport(task_name=self.name, truncated_by="steps" if self.truncate else None)

    async def _trouble(self) -> None:
        if self.hanging:
            await self.hang.wait()
        if self.fail is not None:
            raise self.fail
        await asyncio.sleep(0)

    async def close(self) -> None:
        self.closed += 1

    async def __aenter__(self) -> CountingEnvironment:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


@pytest.fixture
def counting() -> type[CountingEnvironment]:
    return CountingEnvironment
