import asyncio
from typing import Any

from ares_exp.llms.request import LLMClient, LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.policy import EpisodeSpec
from ares_exp.policies.scripted import ScriptedPolicy


class SlowPolicy(ScriptedPolicy):
    def __init__(self, *, delay_sec: float, **more: Any) -> None:
        super().__init__(**more)
        self.delay_sec = delay_sec

    def for_episode(self, episode: EpisodeSpec) -> LLMClient:
        client = super().for_episode(episode)

        async def respond(request: LLMRequest) -> LLMResponse:
            await asyncio.sleep(self.delay_sec)
            return await client(request)

        return respond
