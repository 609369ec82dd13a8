"""The shell agent: one fenced bash block per reply is one command.

A deliberately small scaffold. Its prompts are the files in `templates/`; copy the folder, edit it and set
`agent.templates_dir` to it to change what the agent says.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.conversation import NO_COMPACTION, Compaction, CompactionKind, Conversation
from ares_exp.agents.conversing_factory import (
    SHARED_OPTIONS,
    ConversingAgentFactory,
    FormatErrors,
    Outputs,
    Seconds,
    Tokens,
)
from ares_exp.agents.observation import render_result
from ares_exp.agents.prior_messages import as_plain_chat
from ares_exp.agents.skills import find_skills
from ares_exp.agents.templating import compile_templates
from ares_exp.containers.container import ExecResult
from ares_exp.errors import RepeatedFormatError
from ares_exp.llms.request import LLMClient, Message
from ares_exp.tasks.task_contract import AgentContext

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TEMPLATES = Path(__file__).parent / "templates"
OPENERS = frozenset({"```bash", "```sh", "```shell"})


class ShellAgentFactory(ConversingAgentFactory):
    """Makes shell agents that share one set of compiled templates.

    Attributes:
        command_timeout_sec: Bound on one command in seconds.
        max_output_chars: Longer outputs are shown to the LLM as head and tail, half each, with the elided count.
        format_errors_in_a_row: How many consecutive replies without exactly one command end the episode, which is
            truncated and scored; `None` for no such limit.
        templates_dir: A folder with `system.j2`, `instance.j2`, `observation.j2`, `format_error.j2`, `skills.j2`;
            files that it lacks are taken from the package. For summaries `summarise.j2` and `handoff.j2`.
    """

    templates_folder = TEMPLATES
    own_options = ("command_timeout_sec", "max_output_chars")
    harmless_options = frozenset({*own_options, *SHARED_OPTIONS})

    @validate_call
    def __init__(
        self,
        *,
        command_timeout_sec: Seconds = 120.0,
        max_output_chars: Annotated[int, Field(ge=100)] = 10_000,
        format_errors_in_a_row: FormatErrors = 3,
        templates_dir: Path | None = None,
        compaction: CompactionKind = "none",
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
        self.command_timeout_sec = command_timeout_sec
        self.max_output_chars = max_output_chars

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> ShellAgent:
        """Makes an agent."""
        return ShellAgent(
            container=container,
            llm_client=llm_client,
            templates=self.templates,
            command_timeout_sec=self.command_timeout_sec,
            max_output_chars=self.max_output_chars,
            format_errors_in_a_row=self.format_errors_in_a_row,
            compaction=self.shortening,
        )

    @cached_property
    def templates(self) -> ShellTemplates:
        """The compiled templates. Raises `ConfigError` for a missing folder or a template that does not compile."""
        return ShellTemplates(self.template_folders)


class ShellTemplates:
    """The agent's prompts."""

    def __init__(self, folders: list[Path]) -> None:
        """Loads from the first folder that has a template.

        Raises:
            ConfigError: A template does not compile.
        """
        self.system, self.instance, self.observation, self.format_error, self.skills = compile_templates(
            folders, ("system", "instance", "observation", "format_error", "skills")
        )


def bash_blocks(reply: str) -> list[str]:
    """Finds the contents of the fenced bash blocks of a reply. A block that is not closed does not count."""
    blocks: list[str] = []
    block: list[str] | None = None
    for line in reply.replace("\r\n", "\n").split("\n"):
        mark = line.rstrip()
        if block is None:
            block = [] if mark in OPENERS else None
        elif mark == "```":
            blocks.append("\n".join(block))
            block = None
        else:
            block.append(line)
    return blocks


class ShellAgent:
    """Asks the LLM for one command at a time, runs it, shows it the output, until it submits.

    Attributes:
        format_errors: Number of replies without exactly one bash block.
    """

    def __init__(
        self,
        *,
        container: AgentContainer,
        llm_client: LLMClient,
        templates: ShellTemplates,
        command_timeout_sec: float,
        max_output_chars: int,
        format_errors_in_a_row: int | None = None,
        compaction: Compaction = NO_COMPACTION,
    ) -> None:
        self._container = container
        self._llm = llm_client
        self._templates = templates
        self._command_timeout_sec = command_timeout_sec
        self._max_output_chars = max_output_chars
        self._format_errors_in_a_row = format_errors_in_a_row
        self._compaction = compaction
        self._in_a_row = 0
        self._context = AgentContext()
        self.format_errors = 0

    def set_context(self, context: AgentContext) -> None:
        """Takes an earlier conversation, put before the task, and skills, described to the LLM."""
        self._context = context

    async def run(self, task: str) -> None:
        """Works on `task` until a command's output starts with the submit line.

        Raises:
            RepeatedFormatError: Too many replies in a row had no command, or several.
        """
        start = as_plain_chat(self._context.messages)
        start.append(Message(role="user", content=await self._told(task)))
        conversation = Conversation(
            self._llm, start, compaction=self._compaction, system_prompt=self._templates.system.render()
        )
        while True:
            reply = (await conversation.ask()).text
            observation = await self._act(reply)
            if observation is None:
                return
            conversation.add(Message(role="assistant", content=reply), Message(role="user", content=observation))

    async def _told(self, task: str) -> str:
        """Renders the task, and its skills."""
        told = self._templates.instance.render(task=task)
        if self._context.skills_dir is None:
            return told
        skills = await find_skills(self._container, self._context.skills_dir, timeout_sec=self._command_timeout_sec)
        return f"{told}\n\n{self._templates.skills.render(skills=skills)}" if skills else told

    async def _act(self, reply: str) -> str | None:
        """Runs the command in `reply`; returns the next message to the LLM, `None` when it submitted."""
        blocks = bash_blocks(reply)
        if len(blocks) != 1:
            self.format_errors += 1
            self._in_a_row += 1
            if self._in_a_row == self._format_errors_in_a_row:
                raise RepeatedFormatError(f"{self._in_a_row} replies in a row did not have exactly one bash block.")
            return self._templates.format_error.render(blocks=len(blocks))
        self._in_a_row = 0
        try:
            result = await self._container.exec(blocks[0], timeout_sec=self._command_timeout_sec)
        except ValueError as error:  # a NUL, say: no shell can be given that
            result = ExecResult(output=f"{error}\n", exit_code=126, duration_sec=0.0)
        if result.output.lstrip().partition("\n")[0].strip() == SUBMIT:
            return None
        return render_result(
            self._templates.observation,
            result,
            timeout_sec=self._command_timeout_sec,
            max_output_chars=self._max_output_chars,
        )
