"""The oracle policy, which runs the task's reference solution through the agent, as an LLM would."""

from __future__ import annotations

from ares_exp.errors import PolicyError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import ORACLE_MODEL, LLMResponse
from ares_exp.policies.agent_forms import SUBMIT, form_of
from ares_exp.policies.policy import Policy

SOLVING = "I run the task's own solution."
"""Text of the reply that runs the solution."""

SOLVED = "The solution has run."
"""Text of the reply that submits."""

MOST_SUBMISSIONS = 3
"""Maximum number of consecutive submissions; some agents ask for a confirmation."""

SOLVE = """/solution/solve.sh > /logs/agent/oracle.txt 2>&1; code=$?
echo "$code" > /logs/agent/exit-code.txt
cat /logs/agent/oracle.txt
exit "$code"
"""


class OraclePolicy(Policy):
    """Responds to the first request of an episode with the solution script, and to later ones with the submit command.

    The environment puts the solution into the container (`needs_solution`). An unsolved task shows a defect of the task
    or of this package, because the oracle uses the same path as other policies. An environment without a container puts
    the solving reply into the request as `metadata["solution"]`, and the oracle returns it. The oracle is rejected if a
    source has no solutions (`SourceBase.has_solutions`).
    """

    needs_solution = True
    must_pass = True
    model_name = ORACLE_MODEL

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Returns a reply that runs the solution, or submits if the request's messages show that the solution ran.

        Raises:
            PolicyError: The agent continues after each submission.
        """
        if isinstance(solution := (request.metadata or {}).get("solution"), str):
            return LLMResponse.from_text(solution, model=ORACLE_MODEL, finish_reason="stop")
        said = [str(message["content"]) for message in request.messages if message["role"] == "assistant"]
        if [SOLVED in text for text in said[-MOST_SUBMISSIONS:]] == [True] * MOST_SUBMISSIONS:
            raise PolicyError(
                f"policy=oracle submitted {MOST_SUBMISSIONS} times, and the agent asked again. Expected an agent that "
                "runs fenced bash blocks, tools named `bash` and `submit`, or keystrokes as JSON, and that ends after "
                f"`{SUBMIT.strip()}`. Use policy=scripted with replies in the form of your agent."
            )
        form = form_of(request)
        waiting = form.wait(request) if said else form.run(SOLVING, SOLVE)
        pieces = waiting or form.finish(SOLVED)
        return LLMResponse(pieces, model=ORACLE_MODEL, finish_reason="stop")


NOOP_MODEL = "noop"


class NoopPolicy(Policy):
    """Responds to every request with the submit command."""

    model_name = NOOP_MODEL

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Submits."""
        return LLMResponse(form_of(request).finish("I do nothing."), model=NOOP_MODEL, finish_reason="stop")
