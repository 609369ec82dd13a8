"""The forms in which the package's agents want their replies, told apart by what they ask."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import Piece, TextData, ToolCallData

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"


def form_of(request: LLMRequest) -> BashBlock:
    """Returns the form that the agent wants.

    That is calls of tools if it offers `bash` or `submit`, keystrokes if its first message tells of them, else a bash
    block.
    """
    for message in request.messages:
        told = str(message["content"]) if message["role"] == "user" else ""
        if '"keystrokes"' in told:
            return Keystrokes()
    offered = [str(tool.get("function", {}).get("name")) for tool in request.tools or ()]
    return ToolCalls(offered) if {"bash", "submit"}.intersection(offered) else BashBlock()


class BashBlock:
    """One fenced bash block. Other forms override it."""

    def run(self, thought: str, command: str) -> list[Piece]:
        """Returns a reply that runs a command, given as lines of source text."""
        return [TextData(f"{thought}\n\n```bash\n{command}```\n")]

    def finish(self, thought: str) -> list[Piece]:
        """Returns a reply that ends the work."""
        return self.run(thought, SUBMIT)

    def wait(self, request: LLMRequest) -> list[Piece]:
        """Returns a reply that waits for the end of the command. By default the request shows that it has ended."""
        return []


class ToolCalls(BashBlock):
    """One call of a tool."""

    def __init__(self, offered: Sequence[str]) -> None:
        """Takes the names of the tools."""
        self._offered = offered

    def run(self, thought: str, command: str) -> list[Piece]:
        """Calls `bash`."""
        return [TextData(thought), ToolCallData("call_bash", "bash", json.dumps({"command": command}))]

    def finish(self, thought: str) -> list[Piece]:
        """Calls `submit` if it is offered."""
        if "submit" not in self._offered:
            return super().finish(thought)
        return [TextData(thought), ToolCallData("call_submit", "submit", "{}")]


class Keystrokes(BashBlock):
    """JSON of keystrokes for a terminal."""

    def run(self, thought: str, command: str) -> list[Piece]:
        """Types the command. At the end the terminal says so."""
        return self._typing(thought, f'sh -c {shlex.quote(command)}; echo "[ended with $?]"\n', 0.5)

    def finish(self, thought: str) -> list[Piece]:
        """Declares the task complete; the agent asks once more."""
        return [TextData(json.dumps({"analysis": thought, "plan": "None.", "commands": [], "task_complete": True}))]

    def wait(self, request: LLMRequest) -> list[Piece]:
        """Waits longer each time until the terminal says so."""
        if any(_ENDED.search(str(message["content"])) for message in request.messages):
            return []
        waited = sum(message["role"] == "assistant" for message in request.messages)
        return self._typing("It has not ended.", "", min(2.0**waited, 60.0))

    def _typing(self, thought: str, keys: str, seconds: float) -> list[Piece]:
        commands = [{"keystrokes": keys, "duration": seconds}]
        return [TextData(json.dumps({"analysis": thought, "plan": "I wait for it.", "commands": commands}))]


_ENDED = re.compile(r"\[ended with \d+\]")
