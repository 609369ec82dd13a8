"""The terminal agent: the LLM types into a terminal and sees its screen, in the protocol of terminus-2.

Each reply is JSON with a batch of keystrokes, and how long is waited after each. The response is what is new on
the terminal, or its screen. Its prompts are the files in `terminal_templates/`; copy the folder, edit it and set
`agent.templates_dir` to it to change what the agent says.
"""

from __future__ import annotations

import math
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from ares_exp.agents.templating import compile_templates
from ares_exp.agents.terminal_reply import DEFAULT_SECONDS, Keys, TerminalReply, read_reply
from ares_exp.agents.terminal_screen import TerminalScreen, as_typed, emulator
from ares_exp.errors import AgentError
from ares_exp.llms.request import LLMClient, Message

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATES = Path(__file__).parent / "terminal_templates"
FIRST_SECONDS = 0.2
SKILLS_SEC = 60.0


class TerminalAgentFactory(ConversingAgentFactory):
    """Makes terminal agents that share one set of compiled templates.

    Attributes:
        columns: Width of the terminal.
        lines: Its height.
        max_wait_sec: Bound on the wait after one batch of keystrokes in seconds, whatever the LLM gives.
        max_output_bytes: Longer outputs are shown to the LLM as head and tail, half each, with the elided count.
        format_errors_in_a_row: How many consecutive replies that cannot be read end the episode, which is
            truncated and scored; `None` for no such limit.
        templates_dir: A folder with `instance.j2`, `skills.j2`; files that it lacks are taken from the package. For
            summaries `summarise.j2` and `handoff.j2`.
    """

    needs_terminal = True
    templates_folder = TEMPLATES
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
        """Checks the options, those of `ConversingAgentFactory` and its own."""
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
        """Makes an agent."""
        return TerminalAgent(self, container=container, llm_client=llm_client)

    async def preflight(self) -> None:
        """Compiles the templates and looks for the emulator. Raises `ConfigError` as `templates` does.

        Raises:
            PreflightError: The emulator is not installed.
        """
        emulator()
        await super().preflight()

    @cached_property
    def templates(self) -> tuple[Template, Template]:
        """The compiled templates. Raises `ConfigError` for a missing folder or a template that does not compile."""
        instance, skills = compile_templates(self.template_folders, ("instance", "skills"))
        return instance, skills


class TerminalAgent(ConversingAgent):
    """Types what the LLM says, shows it what the terminal prints, until it has said twice that the task is done."""

    _options: TerminalAgentFactory

    def __init__(self, options: TerminalAgentFactory, *, container: AgentContainer, llm_client: LLMClient) -> None:
        super().__init__(options, container=container, llm_client=llm_client)
        self._screen = TerminalScreen(options.columns, options.lines)
        self._has_terminal = False
        self._lost_terminal = False
        self._wants_to_end = False

    async def run(self, task: str) -> None:
        """Works on `task` until the LLM says twice in a row that it is done.

        Raises:
            AgentError: The container has no terminal.
            RepeatedFormatError: Too many replies in a row could not be read.
        """
        options = self._options
        instance, skills_template = options.templates
        skills = await self._skills(skills_template, SKILLS_SEC)
        await self._type("", FIRST_SECONDS)
        told = instance.render(
            task=task,
            skills=skills,
            screen=self._news(),
            columns=options.columns,
            lines=options.lines,
            max_wait_sec=f"{options.max_wait_sec:g}",
        )
        start = [*as_plain_chat(self._context.messages), Message(role="user", content=told)]
        conversation = Conversation(
            self._llm, start, compaction=options.shortening, state=lambda: self._told_of_screen()
        )
        while True:
            text = (await conversation.ask()).text
            response = await self._act(read_reply(text))
            if response is None:
                return
            conversation.add(Message(role="assistant", content=text), Message(role="user", content=response))

    async def _act(self, reply: TerminalReply) -> str | None:
        """Types what a reply says; returns what the LLM is told, `None` when it is done."""
        if reply.error:
            self._count_format_error("could not be read as JSON of the protocol")
            return (
                f"Previous response had parsing errors:\n{reply.feedback}\n\n"
                "Please fix these issues and provide a proper JSON response."
            )
        self._in_a_row = 0
        for keys in reply.commands:
            await self._type_keys(keys)
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

    async def _type_keys(self, keys: Keys) -> None:
        seconds = keys.seconds if math.isfinite(keys.seconds) else DEFAULT_SECONDS
        typed = as_typed(keys.text, application_cursor=self._screen.application_cursor)
        await self._type(typed, min(max(seconds, 0.0), self._options.max_wait_sec))

    async def _type(self, keys: str, seconds: float) -> None:
        options, container = self._options, self._container
        if not isinstance(container, AgentTerminal):
            raise AgentError(f"The terminal agent needs a terminal, and {type(container).__name__} has none.")
        output = await container.use_terminal(keys, seconds=seconds, columns=options.columns, lines=options.lines)
        if output.is_new:
            self._lost_terminal = self._lost_terminal or self._has_terminal
            self._has_terminal = True
            self._screen = TerminalScreen(options.columns, options.lines)
        self._screen.feed(output.text)

    def _news(self) -> str:
        """Returns what is new, and once that there is a new terminal."""
        lost, self._lost_terminal = self._lost_terminal, False
        note = "The terminal has ended, with what ran in it, and this is a new one.\n"
        return f"{note if lost else ''}{cut_bytes(self._screen.news(), self._options.max_output_bytes)}"

    def _told_of_screen(self) -> str:
        return cut_bytes(f"Current Terminal Screen:\n{self._screen.visible}", self._options.max_output_bytes)


def cut_bytes(text: str, most: int) -> str:
    """Cuts a text of more than `most` bytes in the middle."""
    data, half = text.encode(), most // 2
    if len(data) <= most:
        return text
    head, tail = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}\n[... output limited to {most} bytes; {left_out} interior bytes omitted ...]\n{tail}"
