"""The policy that does nothing: what it scores is given away by the tests."""

from __future__ import annotations

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import LLMResponse
from ares_exp.policies.agent_forms import form_of
from ares_exp.policies.policy import Policy

NOTHING_MODEL = "nothing"


class NothingPolicy(Policy):
    """Answers every request with the submit command."""

    model_name = NOTHING_MODEL

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Submits."""
        return LLMResponse(form_of(request).finish("I do nothing."), model=NOTHING_MODEL, finish_reason="stop")
