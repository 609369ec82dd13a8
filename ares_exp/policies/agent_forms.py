"""The forms in which the package's agents want their replies, told apart by what they ask."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from ares_exp.llms.request import LLMRequest
from ares_exp.llms.response import Piece, TextData, ToolCallData

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"


class ReplyForm(Protocol):
    """How an agent is told what to do."""

    def run(self, thought: str, command: str) -> list[Piece]:
        """Returns a reply that runs a command, given as lines of source text."""
        ...

    def finish(self, thought: str) -> list[Piece]:
        """Returns a reply that ends the work."""
        ...


def form_of(request: LLMRequest) -> ReplyForm:
    """Returns the form that the agent wants: calls of tools if it offers `bash` or `submit`, else a bash block."""
    offered = [str(tool.get("function", {}).get("name")) for tool in request.tools or ()]
    return ToolCalls(offered) if {"bash", "submit"}.intersection(offered) else BashBlock()


class BashBlock:
    """One fenced bash block."""

    def run(self, thought: str, command: str) -> list[Piece]:
        """As `ReplyForm.run`."""
        return [TextData(f"{thought}\n\n```bash\n{command}```\n")]

    def finish(self, thought: str) -> list[Piece]:
        """As `ReplyForm.finish`."""
        return self.run(thought, SUBMIT)


class ToolCalls:
    """One call of a tool."""

    def __init__(self, offered: Sequence[str]) -> None:
        """Takes the names of the tools."""
        self._offered = offered

    def run(self, thought: str, command: str) -> list[Piece]:
        """As `ReplyForm.run`."""
        return self._calling(thought, "bash", command=command)

    def finish(self, thought: str) -> list[Piece]:
        """As `ReplyForm.finish`."""
        return self._calling(thought, "submit") if "submit" in self._offered else self.run(thought, SUBMIT)

    def _calling(self, thought: str, name: str, **arguments: str) -> list[Piece]:
        return [TextData(thought), ToolCallData(f"call_{name}", name, json.dumps(arguments))]
