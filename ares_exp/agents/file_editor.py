"""Viewing and editing of text files in a container, with shell commands that every image has.

Files are read and written with the rights of the agent's user. A file keeps its owner and mode.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from typing import TypeVar

from ares_exp.agents.code_agent import AgentContainer
from ares_exp.agents.tool_calls import EditCall, ToolError
from ares_exp.containers.container import ExecResult

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
