"""The terminal agent: the LLM types into a terminal and sees its screen, in the protocol of terminus-2.

Each reply is JSON or XML with a batch of keystrokes, and how long is waited after each. The answer is what is new on
the terminal, or its screen. Its prompts are the files in `terminal_templates/`; copy the folder, edit it and set
`agent.templates_dir` to it to change what the agent says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer, AgentTerminal
from ares_exp.agents.conversation import CompactionKind, Conversation
from ares_exp.agents.conversing_factory import (
    SHARED_OPTIONS,
    ConversingAgentFactory,
    FormatErrors,
    Outputs,
    Tokens,
)
from ares_exp.agents.prior_messages import as_plain_chat
from ares_exp.agents.skills import find_skills
from ares_exp.agents.templating import compile_templates
from ares_exp.agents.terminal_keys import as_typed
from ares_exp.agents.terminal_reply import DEFAULT_SECONDS, Keys, TerminalReply, read_reply
from ares_exp.agents.terminal_screen import TerminalScreen, emulator
from ares_exp.agents.terminal_xml_reply import read_xml_reply
from ares_exp.errors import AgentError, RepeatedFormatError
from ares_exp.llms.request import LLMClient, Message
from ares_exp.tasks.task_contract import AgentContext

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATES = Path(__file__).parent / "terminal_templates"
ReplyForm = Literal["json", "xml"]
FIRST_SECONDS = 0.2
SKILLS_SEC = 60.0


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of replies.

    Attributes:
        name: What the LLM is told that it is.
        template: The prompt that asks for it.
        read: Reads a reply.
        done: How a reply says again that the task is done.
    """

    name: str
    template: str
    read: Callable[[str], TerminalReply]
    done: str


_FORMS: dict[ReplyForm, _Form] = {
    "json": _Form("JSON", "instance", read_reply, 'include "task_complete": true in your JSON response again.'),
    "xml": _Form(
        "XML", "instance_xml", read_xml_reply, "include <task_complete>true</task_complete> in your XML response again."
    ),
}


class TerminalAgentFactory(ConversingAgentFactory):
    """Makes terminal agents that share one set of compiled templates.

    Attributes:
        reply_form: What the LLM replies in, of the two forms of terminus-2: `json` or `xml`.
        columns: Width of the terminal.
        lines: Its height.
        max_wait_sec: Bound on the wait after one batch of keystrokes in seconds, whatever the LLM gives.
        max_output_bytes: Longer outputs are shown to the LLM as head and tail, half each, with the elided count.
        format_errors_in_a_row: How many consecutive replies that cannot be read end the episode, which is
            truncated and scored; `None` for no such limit.
        templates_dir: A folder with `instance.j2` (of the form `xml` `instance_xml.j2`), `skills.j2`; files that it
            lacks are taken from the package. For summaries `summarise.j2` and `handoff.j2`.
    """

    needs_terminal = True
    templates_folder = TEMPLATES
    own_options = ("reply_form", "columns", "lines", "max_wait_sec", "max_output_bytes")
    harmless_options = frozenset({*own_options, *SHARED_OPTIONS})

    @validate_call
    def __init__(
        self,
        *,
        reply_form: ReplyForm = "json",
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
        self.reply_form: ReplyForm = reply_form
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
        names = (_FORMS[self.reply_form].template, "skills")
        instance, skills = compile_templates(self.template_folders, names)
        return instance, skills


class TerminalAgent:
    """Types what the LLM says, shows it what the terminal prints, until it has said twice that the task is done.

    Attributes:
        format_errors: Number of replies that could not be read.
    """

    def __init__(self, options: TerminalAgentFactory, *, container: AgentContainer, llm_client: LLMClient) -> None:
        self._options = options
        self._form = _FORMS[options.reply_form]
        self._container = container
        self._llm = llm_client
        self._context = AgentContext()
        self._screen = TerminalScreen(options.columns, options.lines)
        self._has_terminal = False
        self._lost_terminal = False
        self._wants_to_end = False
        self._in_a_row = 0
        self.format_errors = 0

    def set_context(self, context: AgentContext) -> None:
        """Takes an earlier conversation, put before the task, and skills, described to the LLM."""
        self._context = context

    async def run(self, task: str) -> None:
        """Works on `task` until the LLM says twice in a row that it is done.

        Raises:
            AgentError: The container has no terminal.
            RepeatedFormatError: Too many replies in a row could not be read.
        """
        instance, _ = self._options.templates
        skills = await self._skills()
        await self._type("", FIRST_SECONDS)
        told = instance.render(task=task, skills=skills, screen=self._news(), **self._limits)
        start = [*as_plain_chat(self._context.messages), Message(role="user", content=told)]
        conversation = Conversation(
            self._llm, start, compaction=self._options.shortening, state=lambda: self._told_of_screen()
        )
        while True:
            text = (await conversation.ask()).text
            answer = await self._act(self._form.read(text))
            if answer is None:
                return
            conversation.add(Message(role="assistant", content=text), Message(role="user", content=answer))

    @property
    def _limits(self) -> dict[str, Any]:
        options = self._options
        return {"columns": options.columns, "lines": options.lines, "max_wait_sec": f"{options.max_wait_sec:g}"}

    async def _skills(self) -> str:
        if self._context.skills_dir is None:
            return ""
        found = await find_skills(self._container, self._context.skills_dir, timeout_sec=SKILLS_SEC)
        return self._options.templates[1].render(skills=found) if found else ""

    async def _act(self, reply: TerminalReply) -> str | None:
        """Types what a reply says; returns what the LLM is told, `None` when it is done."""
        self._count_format(bool(reply.error))
        if reply.error:
            return (
                f"Previous response had parsing errors:\n{reply.feedback}\n\n"
                f"Please fix these issues and provide a proper {self._form.name} response."
            )
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
                f"{self._form.done}"
            )
        return f"Previous response had warnings:\n{reply.feedback}\n\n{news}" if reply.warnings else news

    def _count_format(self, failed: bool) -> None:
        self._in_a_row = self._in_a_row + 1 if failed else 0
        self.format_errors += failed
        if self._in_a_row == self._options.format_errors_in_a_row:
            raise RepeatedFormatError(
                f"{self._in_a_row} replies in a row could not be read as {self._form.name} of the protocol."
            )

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
