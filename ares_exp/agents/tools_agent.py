"""The tools agent, whose LLM calls tools by function calling. A response may contain several calls.

Its prompts are the files in `tools_templates/`. To change them, copy the folder, edit the copy, and set
`agent.templates_dir` to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.conversation import CompactionKind, Conversation, as_plain_chat
from ares_exp.agents.conversing_factory import (
    SHARED_OPTIONS,
    SUBMIT,
    ConversingAgent,
    ConversingAgentFactory,
    FormatErrors,
    Outputs,
    Seconds,
    Tokens,
)
from ares_exp.agents.file_editor import FileEditor
from ares_exp.agents.mcp_tools import McpTools
from ares_exp.agents.tool_calls import (
    BashCall,
    Call,
    McpCall,
    SubmitCall,
    ToolError,
    ToolName,
    UnusableCall,
    as_message,
    definitions,
    read_call,
)
from ares_exp.errors import ConfigError
from ares_exp.llms.request import LLMClient, Message
from ares_exp.llms.response import LLMResponse

ALL_TOOLS: tuple[ToolName, ...] = ("bash", "edit", "submit")


class ToolsAgentFactory(ConversingAgentFactory):
    """Creates tools agents. All of them use the same templates, which are compiled once.

    Attributes:
        tools: Names of the offered tools: `bash`, `edit` or `submit`; `None` for all three. Without `submit`, the LLM
            submits with the command `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`.
        command_timeout_sec: Time limit of one command in seconds if the LLM sets none.
        max_command_timeout_sec: Upper bound on the time limit of one command in seconds.
        max_output_chars: Maximum length of a tool's output in characters. From a longer output, the LLM gets the head
            and the tail (half of the maximum each) and the number of removed characters.
        format_errors_in_a_row: Number of consecutive replies without a usable call after which the episode is truncated
            and scored; `None` for no limit.
        templates_dir: Folder with custom `system.j2`, `instance.j2`, `observation.j2`, `format_error.j2`, `skills.j2`,
            `summarise.j2` and `handoff.j2`. Default templates replace missing files.
    """

    supports = ConversingAgentFactory.supports | {"mcp_servers"}
    templates_folder = Path(__file__).parent / "tools_templates"
    own_options = ("tools", "command_timeout_sec", "max_command_timeout_sec", "max_output_chars")
    harmless_options = frozenset({*own_options, *SHARED_OPTIONS})

    @validate_call
    def __init__(
        self,
        *,
        tools: Annotated[list[ToolName], Field(min_length=1)] | None = None,
        command_timeout_sec: Seconds = 120.0,
        max_command_timeout_sec: Seconds = 600.0,
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
        self.tools: tuple[ToolName, ...] = tuple(dict.fromkeys(ALL_TOOLS if tools is None else tools))
        if not {"bash", "submit"}.intersection(self.tools):
            raise ConfigError("Expected agent.tools to contain bash or submit: without them, the agent cannot finish.")
        self.command_timeout_sec = command_timeout_sec
        self.max_command_timeout_sec = max_command_timeout_sec
        self.max_output_chars = max_output_chars

    def __call__(self, *, container: AgentContainer, llm_client: LLMClient) -> ToolsAgent:
        """Creates an agent."""
        return ToolsAgent(self, container=container, llm_client=llm_client)


class ToolsAgent(ConversingAgent):
    """An agent that executes the tool calls in each response and returns the results, until the LLM submits."""

    _options: ToolsAgentFactory

    def __init__(self, options: ToolsAgentFactory, *, container: AgentContainer, llm_client: LLMClient) -> None:
        super().__init__(options, container=container, llm_client=llm_client)
        self._editor = FileEditor(container, timeout_sec=options.command_timeout_sec)
        self._mcp = McpTools(container, timeout_sec=options.max_command_timeout_sec)
        self._calls = 0

    async def run(self, task: str) -> None:
        """Works on `task` until the LLM submits.

        Raises:
            AgentError: An MCP server of the task cannot be used.
            RepeatedFormatError: Too many consecutive replies had no usable call.
        """
        options, prompts, tools = self._options, self._options.templates, self._options.tools
        await self._mcp.open(self._context.mcp_servers)
        told = prompts.instance.render(task=task, tools=tools, submit=SUBMIT)
        if skills := await self._skills(prompts.skills, options.command_timeout_sec):
            told = f"{told}\n\n{skills}"
        start = [*as_plain_chat(self._context.messages), Message(role="user", content=told)]
        conversation = Conversation(
            self._llm,
            start,
            options=options,
            system_prompt=prompts.system.render(tools=tools),
            tools=[*definitions(tools), *self._mcp.definitions],
        )
        while (results := await self._act(await conversation.ask())) is not None:
            conversation.add(*results)

    async def _act(self, response: LLMResponse) -> Sequence[Message] | None:
        """Executes the calls in a response in order.

        Returns the messages to add to the conversation: the response and the results. Returns `None` if the LLM
        submitted.
        """
        message, pieces = as_message(response, self._calls)
        self._calls += len(pieces)
        calls = [read_call(piece, self._options.tools, self._mcp.tools) for piece in pieces]
        if all(isinstance(call, UnusableCall) for call in calls):
            self._count_format_error("had no usable tool call")
        else:
            self._in_a_row = 0
        if not pieces:
            told = self._options.templates.format_error.render(
                tools=self._options.tools, finish_reason=response.finish_reason
            )
            return message, Message(role="user", content=told)
        messages = [message]
        for piece, call in zip(pieces, calls, strict=True):
            result = await self._result_of(call)
            if result is None:
                return None
            messages.append(Message(role="tool", tool_call_id=piece.id, content=result))
        return messages

    async def _result_of(self, call: Call) -> str | None:
        """Executes one call. Returns its result for the LLM, or `None` if the LLM submitted with this call."""
        if isinstance(call, SubmitCall):
            return None
        if isinstance(call, BashCall):
            options = self._options
            timeout_sec = min(call.timeout_sec or options.command_timeout_sec, options.max_command_timeout_sec)
            return await self._observe(call.command, timeout_sec=timeout_sec, may_submit="submit" not in options.tools)
        try:
            if isinstance(call, UnusableCall):
                raise ToolError(call.why)
            return self._cut(await (self._mcp.call(call) if isinstance(call, McpCall) else self._editor.edit(call)))
        except ToolError as error:
            return f"<error>{self._cut(str(error))}</error>"

    def _cut(self, text: str) -> str:
        most, half = self._options.max_output_chars, self._options.max_output_chars // 2
        if len(text) <= most:
            return text
        return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
