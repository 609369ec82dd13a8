"""A scripted policy that interrupts its run in the middle of an episode."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.scripted import ScriptedPolicy

INTERRUPT = Path("interrupt")
"""The run is interrupted if this file exists in the working directory. The policy removes it."""


class InterruptedPolicy(ScriptedPolicy):
    """As a `ScriptedPolicy`, but sends SIGINT to its own process instead of the second response, once."""

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        return _Client(super().for_episode(episode))


class _Client:
    def __init__(self, script: Any) -> None:
        self._script = script
        self._requests = 0

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        self._requests += 1
        if self._requests == 2 and INTERRUPT.exists():
            INTERRUPT.unlink()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        return await self._script(request)

    def advance(self, request: LLMRequest, response: LLMResponse | None) -> None:
        self._requests += 1
        self._script.advance(request, response)
