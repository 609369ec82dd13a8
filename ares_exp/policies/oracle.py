"""The oracle policy, which makes the agent run the task's reference solution."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

from ares_exp.errors import PolicyError
from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import ORACLE_MODEL, LLMResponse, Piece, TextData, ToolCallData
from ares_exp.policies.policy import Policy

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"

SOLVING = "I run the task's own solution."
"""Text that the oracle adds to the reply that runs the solution."""

SOLVED = "The solution has run."
"""Text that the oracle adds to the reply that submits."""

MOST_SUBMISSIONS = 3
"""Maximum number of consecutive submissions. Some agents require a second submission as a confirmation."""

SOLVE = """/solution/solve.sh > /logs/agent/oracle.txt 2>&1; code=$?
echo "$code" > /logs/agent/exit-code.txt
cat /logs/agent/oracle.txt
exit "$code"
"""


class OraclePolicy(Policy):
    """Makes the agent run the task's reference solution, and then submit, which ends the agent.

    The environment copies the solution into the container (`needs_solution`). Agent, container and verifier work in the
    same way as with other policies. If a task is not solved, either the task or this package therefore has a defect.

    An environment without a container passes the correct reply in `metadata["solution"]` of the request, and the oracle
    returns this reply. The oracle is rejected if the source of the tasks has no solutions
    (`SourceBase.has_solutions`).
    """

    needs_solution = True
    must_pass = True
    model_name = ORACLE_MODEL

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Returns a reply that runs the solution, or a reply that submits if the solution has already run.

        Raises:
            PolicyError: The agent sends another request after `MOST_SUBMISSIONS` submissions.
        """
        if isinstance(solution := (request.metadata or {}).get("solution"), str):
            return LLMResponse.from_text(solution, model=ORACLE_MODEL, finish_reason="stop")
        said = [str(message["content"]) for message in request.messages if message["role"] == "assistant"]
        if [SOLVED in text for text in said[-MOST_SUBMISSIONS:]] == [True] * MOST_SUBMISSIONS:
            raise PolicyError(
                f"policy=oracle submitted {MOST_SUBMISSIONS} times, but the agent sent another request. The oracle "
                "needs an agent that runs fenced bash blocks, tools named `bash` and `submit`, or keystrokes as JSON. "
                f"The agent must end after `{SUBMIT.strip()}`. Use policy=scripted with replies in the format of "
                "your agent."
            )
        form = form_of(request)
        waiting = form.wait(request) if said else form.run(SOLVING, SOLVE)
        pieces = waiting or form.finish(SOLVED)
        return LLMResponse(pieces, model=ORACLE_MODEL, finish_reason="stop")


class NoopPolicy(Policy):
    """Responds to every request with the submit command, so that the agent ends without doing anything."""

    model_name = "noop"

    async def __call__(self, request: LLMRequest) -> LLMResponse:
        """Returns a reply with the submit command, in the format of the agent."""
        return LLMResponse(form_of(request).finish("I do nothing."), model=self.model_name, finish_reason="stop")


def form_of(request: LLMRequest) -> BashBlock:
    """Returns the reply format of the agent that sent a request.

    The format is keystrokes if a user message contains `"keystrokes"`. Otherwise, it is tool calls if the agent offers
    a tool `bash` or `submit`, and a bash block if it does not.
    """
    for message in request.messages:
        told = str(message["content"]) if message["role"] == "user" else ""
        if '"keystrokes"' in told:
            return Keystrokes()
    offered = [str(tool.get("function", {}).get("name")) for tool in request.tools or ()]
    return ToolCalls(offered) if {"bash", "submit"}.intersection(offered) else BashBlock()


class BashBlock:
    """The reply format with one fenced bash block. This class is also the base class of the other formats."""

    def run(self, thought: str, command: str) -> list[Piece]:
        """Returns a reply that runs a command. `command` consists of complete lines, so it ends with a newline."""
        return [TextData(f"{thought}\n\n```bash\n{command}```\n")]

    def finish(self, thought: str) -> list[Piece]:
        """Returns a reply that ends the agent with the submit command."""
        return self.run(thought, SUBMIT)

    def wait(self, request: LLMRequest) -> list[Piece]:
        """Returns a reply that waits for a running command, or an empty list if no command is running (default)."""
        return []


class ToolCalls(BashBlock):
    """The reply format with one tool call."""

    def __init__(self, offered: Sequence[str]) -> None:
        """Stores the names of the tools that the agent offers."""
        self._offered = offered

    def run(self, thought: str, command: str) -> list[Piece]:
        """Returns a call of `bash`."""
        return [TextData(thought), ToolCallData("call_bash", "bash", json.dumps({"command": command}))]

    def finish(self, thought: str) -> list[Piece]:
        """Returns a call of `submit` if it is offered, otherwise a submit command."""
        if "submit" not in self._offered:
            return super().finish(thought)
        return [TextData(thought), ToolCallData("call_submit", "submit", "{}")]


class Keystrokes(BashBlock):
    """The reply format with JSON keystrokes for a terminal."""

    def run(self, thought: str, command: str) -> list[Piece]:
        """Returns keystrokes that run a command, and then print a marker such as `[ended with 0]` in the terminal."""
        return self._typing(thought, f'sh -c {shlex.quote(command)}; echo "[ended with $?]"\n', 0.5)

    def finish(self, thought: str) -> list[Piece]:
        """Returns a reply that declares the task complete. It is sent twice, because the agent asks to confirm it."""
        return [TextData(json.dumps({"analysis": thought, "plan": "None.", "commands": [], "task_complete": True}))]

    def wait(self, request: LLMRequest) -> list[Piece]:
        """Returns a reply that types nothing and waits, each time longer, up to 60 s.

        Returns an empty list if the terminal shows the marker that `run` prints at the end of the command.
        """
        if any(_ENDED.search(str(message["content"])) for message in request.messages):
            return []
        waited = sum(message["role"] == "assistant" for message in request.messages)
        return self._typing("It has not ended.", "", min(2.0**waited, 60.0))

    def _typing(self, thought: str, keys: str, seconds: float) -> list[Piece]:
        commands = [{"keystrokes": keys, "duration": seconds}]
        return [TextData(json.dumps({"analysis": thought, "plan": "I wait for it.", "commands": commands}))]


_ENDED = re.compile(r"\[ended with \d+\]")
