"""One LLM call of an agent, and the clients that wait for its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ares_exp.errors import EpisodeStateError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse


class LineClosedError(Exception):
    """The agent gets no answers any more."""


@dataclass(eq=False, slots=True)
class Turn:
    """One LLM call of the agent.

    Attributes:
        request: What was asked.
        call: Waits for its answer, which is on record when it is there.
        waiting: How many clients wait for the answer, or are being given it.
        is_delivered: Whether a client has got all of it.
    """

    request: LLMRequest
    call: asyncio.Task[LLMResponse]
    waiting: int = 0
    is_delivered: bool = False

    async def answer(self, timeout_sec: float | None = None) -> LLMResponse | None:
        """Waits for the answer, so long at most; `None` when it is not there by then.

        Raises:
            LineClosedError: There will be none: the agent's time is over.
        """
        await asyncio.wait({self.call}, timeout=timeout_sec)
        if not self.call.done():
            return None
        if self.call.cancelled() or isinstance(self.call.exception(), EpisodeStateError):
            raise LineClosedError
        return self.call.result()
