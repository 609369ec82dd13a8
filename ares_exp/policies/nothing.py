"""`policy=noop`: submits at once. A reward that it gets is given away by the tests."""

from __future__ import annotations

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.agent_forms import form_of
from ares_exp.policies.policy import Policy

NOOP_MODEL = "noop"


class NoopPolicy(Policy):
    """Answers every request with the submit command."""

    model_name = NOOP_MODEL

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Submits."""
        return LLMResponse(form_of(request).finish("I do nothing."), model=NOOP_MODEL, finish_reason="stop")
