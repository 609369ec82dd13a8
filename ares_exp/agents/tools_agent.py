"""The tools agent, whose LLM calls tools by function calling. A response may contain several calls.

The tool `edit` views and edits text files with shell commands that every image has. Files are read and written with the
rights of the agent's user. A file keeps its owner and mode.

The prompts of the agent are the files in `tools_templates/`. To change them, copy the folder, edit the copy, and set
`agent.templates_dir` to it.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.conversing_agent import (
    SHARED_OPTIONS,
    SUBMIT,
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
from ares_exp.agents.mcp_tools import McpTools
from ares_exp.agents.tool_calls import (
    BashCall,
    Call,
    EditCall,
    McpCall,
    SubmitCall,
    ToolError,
    ToolName,
    UnusableCall,
    as_message,
    definitions,
    read_call,
)
from ares_exp.containers.container import ExecResult
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


MAX_FILE_BYTES = 4 * 2**20
"""Maximum size in bytes of a file to view or edit."""
MAX_ENTRIES = 1000
CONTEXT_LINES = 4
"""Number of lines shown before and after an edit."""

_IS_DIRECTORY = 21
"""Exit code with which the shell command of `view` reports that the path is a directory."""


T = TypeVar("T")


class FileEditor:
    """Executes the LLM's calls to the `edit` tool, which views, creates and edits text files."""

    def __init__(self, container: AgentContainer, *, timeout_sec: float) -> None:
        """Creates an editor for one container. `timeout_sec` is the time limit of each command."""
        self._container = container
        self._timeout_sec = timeout_sec

    async def edit(self, call: EditCall) -> str:
        """Executes a call and returns the output for the LLM.

        Raises:
            ToolError: The call failed. The file is unchanged, unless writing it failed midway, for example on a full
                disk.
        """
        if call.command == "view":
            return await self._view(call)
        if call.command == "create":
            text = _given(call.file_text, "file_text", call)
            await self._write(call.path, text)
            return f"Wrote {call.path} ({len(text):,} characters)."
        before = _text(await self._run(f"cat {_path(call.path)}"), call.path)
        if call.command == "str_replace":
            old = _given(call.old_str, "old_str", call)
            place, after = _replaced(before, old, call.new_str or "", call.path)
            lines = (call.new_str or "").count("\n") + 1
        else:
            inserted = _given(call.insert_text if call.insert_text is not None else call.new_str, "insert_text", call)
            place, after = _inserted(before, inserted, _given(call.insert_line, "insert_line", call), call.path)
            lines = inserted.count("\n") + 1
        await self._write(call.path, after)
        first = after.count("\n", 0, place) + 1
        shown = _numbered(after, first - CONTEXT_LINES, first + lines - 1 + CONTEXT_LINES)
        return f"Changed {call.path}. Around the change it reads now:\n{shown}"

    async def _view(self, call: EditCall) -> str:
        path = _path(call.path)
        hidden = f"\\( -name '.?*' ! -path {path} -o -name node_modules \\) -prune -o -print"
        result = await self._run(
            f"if [ -d {path} ]; then find {path} -maxdepth 2 {hidden}; exit {_IS_DIRECTORY}; fi; cat {path}"
        )
        if result.exit_code == _IS_DIRECTORY:
            entries = sorted(result.output.splitlines())
            more = f"\n… and {len(entries) - MAX_ENTRIES} more" if len(entries) > MAX_ENTRIES else ""
            return "\n".join(entries[:MAX_ENTRIES]) + more
        text = _text(result, call.path)
        count = len(_lines(text))
        first, last = call.view_range or (1, -1)
        last = count if last == -1 else last
        if call.view_range is not None and not 1 <= first <= last <= count:
            raise ToolError(
                f"Expected view_range to be [first, last] with 1 <= first <= last <= {count}, the number of lines of "
                f"{call.path}, got {list(call.view_range)}."
            )
        return _numbered(text, first, last) if text else f"{call.path} is empty."

    async def _write(self, path: str, text: str) -> None:
        name, folder = _path(path), _path(posixpath.dirname(path) or ".")
        result = await self._run(f"mkdir -p {folder} && printf %s {shlex.quote(text)} > {name}")
        if result.exit_code != 0:
            raise ToolError(f"{path} could not be written: {(result.stderr or '').strip()}")

    async def _run(self, script: str) -> ExecResult:
        try:
            return await self._container.exec(
                script,
                shell="sh -c",
                timeout_sec=self._timeout_sec,
                max_output_bytes=2 * MAX_FILE_BYTES,
                separate_stderr=True,
            )
        except ValueError as error:  # for example, a NUL, which no shell accepts
            raise ToolError(str(error)) from None


def _path(path: str) -> str:
    """Quotes a path for the shell. A relative path gets the prefix `./`, so that it cannot look like an option."""
    return shlex.quote(path if path.startswith("/") else f"./{path}")


def _given(value: T | None, name: str, call: EditCall) -> T:
    if value is None:
        raise ToolError(f"`{call.command}` needs `{name}`.")
    return value


def _text(result: ExecResult, path: str) -> str:
    if result.timed_out:
        raise ToolError(f"{path} could not be read in time.")
    if result.exit_code != 0:
        raise ToolError(f"{path} could not be read: {(result.stderr or '').strip()}")
    if result.elided_bytes or len(result.output) > MAX_FILE_BYTES:
        raise ToolError(f"{path} has more than {MAX_FILE_BYTES:,} bytes: use bash.")
    if "\0" in result.output or "\ufffd" in result.output:
        raise ToolError(f"{path} is not UTF-8 text: use bash.")
    return result.output


def _replaced(text: str, old: str, new: str, path: str) -> tuple[int, str]:
    """Returns the position of `old`, and the text with `new` instead. Raises `ToolError` unless `old` occurs once."""
    count = text.count(old) if old else 0
    if count == 0:
        raise ToolError(f"Nothing was changed: old_str is not in {path}. It must occur exactly, including whitespace.")
    if count > 1:
        places = [text.count("\n", 0, found.start()) + 1 for found in re.finditer(re.escape(old), text)]
        lines = ", ".join(map(str, places[:20]))
        raise ToolError(
            f"Nothing was changed: old_str occurs {count} times in {path}, on lines {lines}. "
            "Add surrounding lines to old_str until it is unique."
        )
    place = text.index(old)
    return place, text.replace(old, new)


def _inserted(text: str, new: str, line: int, path: str) -> tuple[int, str]:
    """Inserts `new` as lines after line `line` (0 for the start). Returns the position of `new` and the changed text.

    Raises `ToolError` if the text has fewer than `line` lines.
    """
    lines = _lines(text)
    if line > len(lines):
        raise ToolError(f"Expected insert_line to be from 0 to {len(lines)}, the line count of {path}, got {line}.")
    before = "".join(lines[:line])
    if before and not before.endswith("\n"):
        before += "\n"
    rest = "".join(lines[line:])
    end = "" if new.endswith("\n") or not new else "\n"
    return len(before), f"{before}{new}{end}{rest}"


def _lines(text: str) -> list[str]:
    """Splits the text into lines that keep their newlines. Unlike `str.splitlines`, ignores other line breaks."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _numbered(text: str, first: int, last: int) -> str:
    """Returns lines `first` to `last` with their numbers, as `cat -n` does. Ignores numbers outside of the text."""
    lines = _lines(text)
    chosen = range(max(first, 1), min(last, len(lines)) + 1)
    return "\n".join(f"{number:6d}\t{lines[number - 1].removesuffix(chr(10))}" for number in chosen)
