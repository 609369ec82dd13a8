"""The shell agent, which runs one fenced bash block per reply as a command.

The agent is deliberately small. Its prompts are the files in `templates/`. To change them, copy the folder, edit the
copy, and set `agent.templates_dir` to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.conversing_agent import (
    SHARED_OPTIONS,
    CompactionKind,
    Conversation,
    ConversingAgent,
    ConversingAgentFactory,
    FormatErrors,
    Outputs,
    Seconds,
    Tokens,
    as_plain_chat,
)
from ares_exp.agents.conversing_agent import SUBMIT as SUBMIT
from ares_exp.llms.request import LLMClient, Message

OPENERS = frozenset({"```bash", "```sh", "```shell"})


class ShellAgentFactory(ConversingAgentFactory):
    """Creates shell agents. All of them use the same templates, which are compiled once.

    Attributes:
        command_timeout_sec: Time limit of one command in seconds.
        max_output_chars: Maximum length of a command's output in characters. From a longer output, the LLM gets the
            head and the tail (half of the maximum each) and the number of removed characters.
        format_errors_in_a_row: Number of consecutive replies with no command, or with several commands, after which the
            episode is truncated and scored; `None` for no limit.
        templates_dir: Folder with custom `system.j2`, `instance.j2`, `observation.j2`, `format_error.j2`, `skills.j2`,
            `summarise.j2` and `handoff.j2`. Default templates replace missing files.
    """

    templates_folder = Path(__file__).parent / "templates"
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
        """Validates the shared options of `ConversingAgentFactory` and the options of this agent."""
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
        """Creates an agent."""
        return ShellAgent(self, container=container, llm_client=llm_client)


def bash_blocks(reply: str) -> list[str]:
    """Returns the contents of the fenced bash blocks of a reply. Ignores a block without a closing fence."""
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


class ShellAgent(ConversingAgent):
    """An agent that runs one command per reply of the LLM and responds with the output, until the LLM submits."""

    _options: ShellAgentFactory

    async def run(self, task: str) -> None:
        """Works on `task` until the LLM submits, with a command whose output starts with the line `SUBMIT`.

        Raises:
            RepeatedFormatError: Too many consecutive replies contained no command, or several commands.
        """
        options, prompts = self._options, self._options.templates
        told = prompts.instance.render(task=task)
        if skills := await self._skills(prompts.skills, options.command_timeout_sec):
            told = f"{told}\n\n{skills}"
        start = [*as_plain_chat(self._context.messages), Message(role="user", content=told)]
        conversation = Conversation(self._llm, start, options=options, system_prompt=prompts.system.render())
        while True:
            reply = (await conversation.ask()).text
            observation = await self._act(reply)
            if observation is None:
                return
            conversation.add(Message(role="assistant", content=reply), Message(role="user", content=observation))

    async def _act(self, reply: str) -> str | None:
        """Runs the command in `reply`. Returns the next message to the LLM, or `None` if the LLM submitted."""
        options, prompts = self._options, self._options.templates
        blocks = bash_blocks(reply)
        if len(blocks) != 1:
            self._count_format_error("did not have exactly one bash block")
            return str(prompts.format_error.render(blocks=len(blocks)))
        self._in_a_row = 0
        return await self._observe(blocks[0], timeout_sec=options.command_timeout_sec)
