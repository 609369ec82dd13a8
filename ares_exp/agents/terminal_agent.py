"""The terminal agent, whose LLM types into a terminal and sees the screen.

It uses the protocol of Harbor's agent terminus-2. Each reply of the LLM is a JSON object with batches of keystrokes and
the time to wait after each batch. The agent responds with the new output of the terminal, or with the complete screen,
which it emulates with `pyte`. Errors and warnings about a reply have the same text as in terminus-2. If the meaning of
a malformed reply is clear, the reply is accepted and the LLM gets a warning.

Its prompts are the files in `terminal_templates/`. To change them, copy the folder, edit the copy, and set
`agent.templates_dir` to it.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, validate_call

from ares_exp.agents.code_agent import AgentContainer, AgentTerminal
from ares_exp.agents.conversing_agent import (
    SHARED_OPTIONS,
    CompactionKind,
    Conversation,
    ConversingAgent,
    ConversingAgentFactory,
    FormatErrors,
    Outputs,
    Tokens,
    as_plain_chat,
)
from ares_exp.errors import AgentError, PreflightError
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


# The screen and the keyboard


_PLAIN = {
    "Enter": "\r",
    "Tab": "\t",
    "BTab": "\x1b[Z",
    "Escape": "\x1b",
    "Space": " ",
    "BSpace": "\x7f",
    "IC": "\x1b[2~",
    "Insert": "\x1b[2~",
    "DC": "\x1b[3~",
    "Delete": "\x1b[3~",
    "PPage": "\x1b[5~",
    "PageUp": "\x1b[5~",
    "PgUp": "\x1b[5~",
    "NPage": "\x1b[6~",
    "PageDown": "\x1b[6~",
    "PgDn": "\x1b[6~",
    **{f"F{number}": f"\x1bO{letter}" for number, letter in zip(range(1, 5), "PQRS", strict=True)},
    **{f"F{n}": f"\x1b[{code}~" for n, code in zip(range(5, 13), (15, 17, 18, 19, 20, 21, 23, 24), strict=True)},
}
_CURSOR = {"Up": "A", "Down": "B", "Right": "C", "Left": "D", "Home": "H", "End": "F"}


def as_typed(keys: str, *, application_cursor: bool) -> str:
    """Returns the characters that a terminal receives for the name of a key (`Up`, `C-c`, `M-x`) or for a text.

    Each newline in a text becomes a carriage return, the character of the Enter key. With `application_cursor`, the
    cursor keys have the codes that they send after a program has switched the terminal to application mode.
    """
    if keys in _PLAIN:
        return _PLAIN[keys]
    if keys in _CURSOR:
        return f"\x1b{'O' if application_cursor else '['}{_CURSOR[keys]}"
    modifier, key = keys[:-1], keys[-1:]
    if modifier in ("C-", "^") and (key.isascii() and (key.isalpha() or key in "@[\\]^_")):
        return chr(ord(key.upper()) & 0x1F)
    if modifier == "M-" and key.isprintable():
        return f"\x1b{key}"
    return keys.replace("\r\n", "\r").replace("\n", "\r")


HISTORY_LINES = 20_000
_CURSOR_KEYS = 1 << 5
"""Terminal mode 1 (application mode of the cursor keys). `pyte` shifts the numbers of private modes by 5 bits."""
_ALTERNATE = (47, 1047, 1049)
"""Private modes that full-screen programs use to switch to an alternate screen."""


class TerminalScreen:
    """The screen of a terminal, and the last lines that have scrolled off its top."""

    def __init__(self, columns: int, lines: int) -> None:
        """Creates an empty screen. Raises `PreflightError` if `pyte` is not installed."""
        pyte = emulator()
        self._screen = _screen_class()(columns, lines, history=HISTORY_LINES, ratio=0.5)
        self._stream = pyte.Stream(self._screen)
        self._told: str | None = None

    def feed(self, text: str) -> None:
        """Processes the output of a terminal, with its control sequences."""
        self._stream.feed(text)

    @property
    def application_cursor(self) -> bool:
        """Whether a program has switched the cursor keys to application mode; see `as_typed`."""
        return _CURSOR_KEYS in self._screen.mode

    @property
    def visible(self) -> str:
        """Current content of the screen."""
        return _text(line.rstrip() for line in self._screen.display)

    @property
    def everything(self) -> str:
        """Content of the screen, preceded by the lines that have scrolled off (at most about `HISTORY_LINES`)."""
        columns, above = range(self._screen.columns), self._screen.history.top
        lines = ["".join(line[column].data for column in columns) for line in above]
        return _text(line.rstrip() for line in [*lines, *self._screen.display])

    def news(self) -> str:
        """Returns the output since the previous call, preceded by the last line of the earlier output as context.

        At the first call, after a change of the earlier content, or without new output, returns the visible screen.
        """
        now, before, self._told = self.everything, self._told, self.everything
        if before is not None and before.strip() in now:
            before = before.strip()
            new = now[before.rfind("\n") if "\n" in before else now.index(before) :]
            if new.strip():
                return f"New Terminal Output:\n{new}"
        return f"Current Terminal Screen:\n{self.visible}"


def _text(lines: Any) -> str:
    return "\n".join(lines).rstrip("\n") + "\n"


@cache
def emulator() -> Any:
    """Imports and returns `pyte`, which emulates the terminal. Raises `PreflightError` if it is not installed."""
    try:
        import pyte
    except ImportError:
        raise PreflightError(
            "agent=terminal emulates the terminal's screen with pyte: pip install 'ares-exp[terminal]'."
        ) from None
    return pyte


@cache
def _screen_class() -> Any:
    """Returns a subclass of pyte's `HistoryScreen` that shows the earlier content after a program such as vim ends."""
    base: Any = emulator().HistoryScreen

    class Screen(base):  # type: ignore[misc]
        main: Any = None

        def set_mode(self, *modes: int, **more: Any) -> None:
            super().set_mode(*modes, **more)
            if more.get("private") and self.main is None and set(modes) & set(_ALTERNATE):
                self.main = copy.deepcopy(self.buffer), copy.copy(self.cursor), self.history
                super().erase_in_display(2)
                super().cursor_position()

        def reset_mode(self, *modes: int, **more: Any) -> None:
            super().reset_mode(*modes, **more)
            if more.get("private") and self.main is not None and set(modes) & set(_ALTERNATE):
                self.buffer, self.cursor, self.history = self.main
                self.main = None
                self.dirty.update(range(self.lines))

    return Screen


# The replies of the LLM


DEFAULT_SECONDS = 1.0
SHOWN_CHARS = 100

_FIELDS = ("analysis", "plan", "commands")
_NOTHING_FOUND = "No valid JSON found in response"
_NO_JSON = "Invalid JSON"
_OBJECT = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Keystrokes, and the time to wait after them.

    Attributes:
        text: Text to type, or the name of a key (see `as_typed`).
        seconds: Time to wait in seconds, as requested by the LLM.
    """

    text: str
    seconds: float


@dataclass(frozen=True, slots=True)
class TerminalReply:
    """A parsed reply.

    Attributes:
        commands: Batches of keystrokes, in order; empty if the reply has an error.
        is_complete: Whether the reply reports that the task is done.
        error: Reason why the reply is unusable; empty if it is usable.
        warnings: Deviations from the format that do not make the reply unusable.
    """

    commands: tuple[Keys, ...] = ()
    is_complete: bool = False
    error: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def feedback(self) -> str:
        """Text with the error and the warnings for the LLM; empty if the reply has no error and no warnings."""
        parts = [f"ERROR: {self.error}"] if self.error else []
        if self.warnings:
            parts.append("WARNINGS: " + "\n".join(f"- {warning}" for warning in self.warnings))
        return "\n".join(parts)


def read_reply(text: str) -> TerminalReply:
    """Parses a reply.

    If this fails, adds missing closing braces or removes the text around the JSON object, and parses the result. In
    this case, the reply has a warning.
    """
    reply = _read(text)
    if not reply.error:
        return reply
    for what, mended in _mended(text, reply.error):
        if not (again := _read(mended)).error:
            told = f"AUTO-CORRECTED: {what} - please fix this in future responses"
            return replace(again, warnings=(told, *again.warnings))
    return reply


def _read(text: str) -> TerminalReply:
    place = _find_object(text)
    if place is None:
        return TerminalReply(error=_NOTHING_FOUND, warnings=("No valid JSON object found",))
    around = {"before": text[: place.start], "after": text[place.stop :]}
    warnings = [f"Extra text detected {side} JSON object" for side, part in around.items() if part.strip()]
    source = text[place]
    try:
        data = json.loads(source)
    except (ValueError, RecursionError) as error:
        shown = (
            f"Content: {source!r}" if len(source) < 2 * SHOWN_CHARS else f"Content preview: {source[:SHOWN_CHARS]!r}..."
        )
        return TerminalReply(error=f"{_NO_JSON}: {error} | {shown}", warnings=tuple(warnings))
    if missing := [name for name in _FIELDS if name not in data]:
        return TerminalReply(error=f"Missing required fields: {', '.join(missing)}", warnings=tuple(warnings))
    warnings += [f"Field '{name}' should be a string" for name in _FIELDS[:2] if not isinstance(data[name], str)]
    if not isinstance(data["commands"], list):
        return TerminalReply(error="Field 'commands' must be an array", warnings=tuple(warnings))
    warnings += _of_order(source)
    complete = data.get("task_complete")
    if not isinstance(complete, bool | str | None):
        warnings.append("Field 'task_complete' should be a boolean or string")
    is_complete = complete.lower() in ("true", "1", "yes") if isinstance(complete, str) else bool(complete)
    try:
        given = data["commands"]
        commands = [_command(one, number, number == len(given), warnings) for number, one in enumerate(given, 1)]
    except ValueError as error:
        if is_complete:
            return TerminalReply(is_complete=True, warnings=(*warnings, str(error)))
        return TerminalReply(error=str(error), warnings=tuple(warnings))
    return TerminalReply(tuple(commands), is_complete, warnings=tuple(warnings))


def _find_object(text: str) -> slice | None:
    """Returns the position of the first `{…}` with balanced braces outside of quotes, or `None` if there is none."""
    depth, start, quoted, escaped = 0, -1, False, False
    for place, char in enumerate(text):
        if escaped or char == "\\":
            escaped = not escaped
        elif char == '"':
            quoted = not quoted
        elif char == "{" and not quoted:
            start, depth = (place if depth == 0 else start), depth + 1
        elif char == "}" and not quoted:
            depth -= 1
            if depth == 0 and start >= 0:
                return slice(start, place + 1)
    return None


def _of_order(source: str) -> list[str]:
    """Returns a warning in a list if the fields are not in the order of the protocol, otherwise an empty list."""
    matches = {name: re.search(rf'"{name}"\s*:', source) for name in _FIELDS}
    places = {name: match.start() for name, match in matches.items() if match is not None}
    found = sorted(places, key=lambda name: places[name])
    if len(found) < 2 or found == list(places):
        return []
    return [f"Fields appear in wrong order. Found: {' → '.join(found)}, expected: {' → '.join(places)}"]


def _command(given: Any, number: int, is_last: bool, warnings: list[str]) -> Keys:
    which = f"Command {number}"
    if not isinstance(given, dict):
        raise ValueError(f"{which} must be an object")
    if "keystrokes" not in given:
        raise ValueError(f"{which} missing required 'keystrokes' field")
    keys, seconds = given["keystrokes"], given.get("duration", DEFAULT_SECONDS)
    if not isinstance(keys, str):
        raise ValueError(f"{which} 'keystrokes' must be a string")
    if "duration" not in given:
        warnings.append(f"{which}: Missing duration field, using default {DEFAULT_SECONDS}")
    elif not isinstance(seconds, int | float):
        warnings.append(f"{which}: Invalid duration value, using default {DEFAULT_SECONDS}")
        seconds = DEFAULT_SECONDS
    if unknown := sorted(given.keys() - {"keystrokes", "duration"}):
        warnings.append(f"{which}: Unknown fields: {', '.join(unknown)}")
    if keys and not keys.endswith("\n") and not is_last:
        warnings.append(
            f"{which} should end with newline when followed by another command. Otherwise the two commands will be "
            "concatenated together on the same line."
        )
    return Keys(keys, float(seconds))


def _mended(text: str, error: str) -> Iterator[tuple[str, str]]:
    """Yields attempts to make a reply with an error usable: what was done, and the changed reply."""
    missing = text.count("{") - text.count("}")
    if missing > 0 and error.startswith((_NO_JSON, _NOTHING_FOUND)):
        yield "Fixed incomplete JSON by adding missing closing brace", text + "}" * missing
    for found in _OBJECT.findall(text):
        with suppress(ValueError, RecursionError):
            json.loads(found)
            yield "Extracted JSON from mixed content", found
            return
