"""The reply formats of the bundled agents, detected from the agent's request."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import Piece, TextData, ToolCallData

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"


def form_of(request: LLMRequest) -> BashBlock:
    """Returns the reply format of the agent that sent a request.

    The format is tool calls if the agent offers `bash` or `submit`, keystrokes if a user message mentions them,
    otherwise a bash block.
    """
    for message in request.messages:
        told = str(message["content"]) if message["role"] == "user" else ""
        if '"keystrokes"' in told:
            return Keystrokes()
    offered = [str(tool.get("function", {}).get("name")) for tool in request.tools or ()]
    return ToolCalls(offered) if {"bash", "submit"}.intersection(offered) else BashBlock()


class BashBlock:
    """The reply format with one fenced bash block, and the base class of the other formats."""

    def run(self, thought: str, command: str) -> list[Piece]:
        """Returns a reply that runs a command, given as lines of source text."""
        return [TextData(f"{thought}\n\n```bash\n{command}```\n")]

    def finish(self, thought: str) -> list[Piece]:
        """Returns a reply that ends the work."""
        return self.run(thought, SUBMIT)

    def wait(self, request: LLMRequest) -> list[Piece]:
        """Returns a reply that waits for a running command, or an empty list if none is running (the default)."""
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
        """Returns keystrokes that type the command and print a marker at its end."""
        return self._typing(thought, f'sh -c {shlex.quote(command)}; echo "[ended with $?]"\n', 0.5)

    def finish(self, thought: str) -> list[Piece]:
        """Returns a reply that declares the task complete. The agent asks for a confirmation."""
        return [TextData(json.dumps({"analysis": thought, "plan": "None.", "commands": [], "task_complete": True}))]

    def wait(self, request: LLMRequest) -> list[Piece]:
        """Returns a reply that waits longer each time, until the terminal shows the marker."""
        if any(_ENDED.search(str(message["content"])) for message in request.messages):
            return []
        waited = sum(message["role"] == "assistant" for message in request.messages)
        return self._typing("It has not ended.", "", min(2.0**waited, 60.0))

    def _typing(self, thought: str, keys: str, seconds: float) -> list[Piece]:
        commands = [{"keystrokes": keys, "duration": seconds}]
        return [TextData(json.dumps({"analysis": thought, "plan": "I wait for it.", "commands": commands}))]


_ENDED = re.compile(r"\[ended with \d+\]")
