"""The oracle policy: runs the task's own solution, through the agent, as an LLM would."""

from __future__ import annotations

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import ORACLE_MODEL, LLMResponse
from ares_exp.policies.agent_forms import form_of
from ares_exp.policies.policy import Policy

SOLVING = "I run the task's own solution."
"""What it says with the command."""

SOLVE = """/solution/solve.sh > /logs/agent/oracle.txt 2>&1; code=$?
echo "$code" > /logs/agent/exit-code.txt
cat /logs/agent/oracle.txt
exit "$code"
"""


class OraclePolicy(Policy):
    """Answers the first request of an episode with the solution script, the next with the submit command.

    The environment puts the solution into the container (`needs_solution`), so a task that its oracle does not solve is
    a broken task, or a broken part of this package: every part of the path is exercised. An environment without a
    container puts the reply that solves the task into the request, as `metadata["solution"]`: that is the response
    then. It is refused where a source has no solutions (`SourceBase.has_solutions`).
    """

    needs_solution = True
    must_pass = True
    model_name = ORACLE_MODEL

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Solves first, then submits; what was said so far is in the request."""
        if isinstance(solution := (request.metadata or {}).get("solution"), str):
            return LLMResponse.from_text(solution, model=ORACLE_MODEL, finish_reason="stop")
        said = any(message["role"] == "assistant" for message in request.messages)
        form = form_of(request)
        waiting = form.wait(request) if said else form.run(SOLVING, SOLVE)
        pieces = waiting or form.finish("The solution has run.")
        return LLMResponse(pieces, model=ORACLE_MODEL, finish_reason="stop")


NOOP_MODEL = "noop"


class NoopPolicy(Policy):
    """Answers every request with the submit command."""

    model_name = NOOP_MODEL

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Submits."""
        return LLMResponse(form_of(request).finish("I do nothing."), model=NOOP_MODEL, finish_reason="stop")
