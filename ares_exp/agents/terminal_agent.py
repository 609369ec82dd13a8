"""The terminal agent, whose LLM types into a terminal and sees the screen.

It uses the protocol of Harbor's agent terminus-2. Each reply of the LLM is a JSON object with batches of keystrokes and
the time to wait after each batch. The agent responds with the new output of the terminal, or with the complete screen.
Its prompts are the files in `terminal_templates/`. To change them, copy the folder, edit the copy, and set
`agent.templates_dir` to it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer, AgentTerminal
from ares_exp.agents.conversation import CompactionKind, Conversation, as_plain_chat
from ares_exp.agents.conversing_factory import (
    SHARED_OPTIONS,
    ConversingAgent,
    ConversingAgentFactory,
    FormatErrors,
    Outputs,
    Tokens,
)
from ares_exp.agents.terminal_reply import DEFAULT_SECONDS, TerminalReply, read_reply
from ares_exp.agents.terminal_screen import TerminalScreen, as_typed, emulator
from ares_exp.errors import AgentError
from ares_exp.llms.request import LLMClient, Message

FIRST_SECONDS = 0.2
SKILLS_SEC = 60.0


class TerminalAgentFactory(ConversingAgentFactory):
    """Creates terminal agents. All of them use the same templates, which are compiled once.

    Attributes:
        columns: Width of the terminal in characters.
        lines: Height of the terminal in characters.
        max_wait_sec: Upper bound in seconds on the wait after one batch of keystrokes.
        max_output_bytes: Maximum length of an output in bytes. From a longer output, the LLM gets the head and the tail
            (half of the maximum each) and the number of removed bytes.
        format_errors_in_a_row: Number of consecutive malformed replies after which the episode is truncated and scored;
            `None` for no limit.
        templates_dir: Folder with custom `instance.j2`, `skills.j2`, `summarise.j2` and `handoff.j2`. Default templates
            replace missing files.
    """

    needs_terminal = True
    templates_folder = Path(__file__).parent / "terminal_templates"
    template_names = ("instance", "skills")
    own_options = ("columns", "lines", "max_wait_sec", "max_output_bytes")
    harmless_options = frozenset({*own_options, *SHARED_OPTIONS})

    @validate_call
    def __init__(
        self,
        *,
        columns: Annotated[int, Field(ge=20, le=1000)] = 160,
        lines: Annotated[int, Field(ge=5, le=1000)] = 40,
        max_wait_sec: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 60.0,
        max_output_bytes: Annotated[int, Field(ge=100)] = 10_000,
        format_errors_in_a_row: FormatErrors = 3,
        templates_dir: Path | None = None,
        compaction: CompactionKind = "summarise",
        compaction_tokens: Tokens = 100_000,
        compaction_keeps: Outputs = 5,
    ) -> None:
        """Validates the shared options of `ConversingAgentFactory` and the options of this agent."""
        super().__init__(
            format_errors_in_a_row=format_errors_in_a_row,
            templates_dir=templates_dir,
            compaction=compaction,
            compaction_tokens=compaction_tokens,
            compaction_keeps=compaction_keeps,
        )
        self.columns = columns
        self.lines = lines
        self.max_wait_sec = max_wait_sec
        self.max_output_bytes = max_output_bytes

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> TerminalAgent:
        """Creates an agent."""
        return TerminalAgent(self, container=container, llm_client=llm_client)

    async def preflight(self) -> None:
        """Checks that the terminal emulator `pyte` is installed, and compiles the templates.

        Raises:
            PreflightError: `pyte` is not installed.
            ConfigError: A folder is missing, or a template does not compile.
        """
        emulator()
        await super().preflight()


class TerminalAgent(ConversingAgent):
    """An agent that types the LLM's keystrokes and shows it the terminal, until the LLM confirms that it is done."""

    _options: TerminalAgentFactory

    def __init__(self, options: TerminalAgentFactory, *, container: AgentContainer, llm_client: LLMClient) -> None:
        super().__init__(options, container=container, llm_client=llm_client)
        self._screen = TerminalScreen(options.columns, options.lines)
        self._has_terminal = False
        self._lost_terminal = False
        self._wants_to_end = False

    async def run(self, task: str) -> None:
        """Works on `task` until two consecutive replies report that it is done.

        Raises:
            AgentError: The container has no terminal.
            RepeatedFormatError: Too many consecutive replies were malformed.
        """
        options = self._options
        skills = await self._skills(options.templates.skills, SKILLS_SEC)
        await self._type("", FIRST_SECONDS)
        told = options.templates.instance.render(
            task=task,
            skills=skills,
            screen=self._news(),
            columns=options.columns,
            lines=options.lines,
            max_wait_sec=f"{options.max_wait_sec:g}",
        )
        start = [*as_plain_chat(self._context.messages), Message(role="user", content=told)]
        conversation = Conversation(
            self._llm,
            start,
            options=options,
            state=lambda: cut_bytes(f"Current Terminal Screen:\n{self._screen.visible}", options.max_output_bytes),
        )
        while True:
            text = (await conversation.ask()).text
            response = await self._act(read_reply(text))
            if response is None:
                return
            conversation.add(Message(role="assistant", content=text), Message(role="user", content=response))

    async def _act(self, reply: TerminalReply) -> str | None:
        """Types the keystrokes of a reply. Returns the next message to the LLM, or `None` if the agent is done."""
        if reply.error:
            self._count_format_error("could not be parsed as JSON")
            return (
                f"Previous response had parsing errors:\n{reply.feedback}\n\n"
                "Please fix these issues and provide a proper JSON response."
            )
        self._in_a_row = 0
        for keys in reply.commands:
            seconds = keys.seconds if math.isfinite(keys.seconds) else DEFAULT_SECONDS
            typed = as_typed(keys.text, application_cursor=self._screen.application_cursor)
            await self._type(typed, min(max(seconds, 0.0), self._options.max_wait_sec))
        if reply.is_complete and self._wants_to_end:
            return None
        self._wants_to_end = reply.is_complete
        news = self._news()
        if reply.is_complete:
            return (
                f"Current terminal state:\n{news}\n\nAre you sure you want to mark the task as complete? This will "
                "trigger your solution to be graded and you won't be able to make any further corrections. If so, "
                'include "task_complete": true in your JSON response again.'
            )
        return f"Previous response had warnings:\n{reply.feedback}\n\n{news}" if reply.warnings else news

    async def _type(self, keys: str, seconds: float) -> None:
        options, container = self._options, self._container
        if not isinstance(container, AgentTerminal):
            raise AgentError(f"agent=terminal needs a terminal, but a {type(container).__name__} does not have one.")
        output = await container.use_terminal(keys, seconds=seconds, columns=options.columns, lines=options.lines)
        if output.is_new:
            self._lost_terminal = self._lost_terminal or self._has_terminal
            self._has_terminal = True
            self._screen = TerminalScreen(options.columns, options.lines)
        self._screen.feed(output.text)

    def _news(self) -> str:
        """Returns the new output for the LLM. If the old terminal has ended and was replaced, starts with a note."""
        lost, self._lost_terminal = self._lost_terminal, False
        note = "The terminal has ended, with all programs in it. This is a new terminal.\n"
        return f"{note if lost else ''}{cut_bytes(self._screen.news(), self._options.max_output_bytes)}"


def cut_bytes(text: str, most: int) -> str:
    """Removes the middle of a text that is longer than `most` bytes."""
    data, half = text.encode(), most // 2
    if len(data) <= most:
        return text
    head, tail = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}\n[... output limited to {most} bytes; {left_out} interior bytes omitted ...]\n{tail}"
