"""Parsing of the replies of the terminal agent's LLM. A reply is a JSON object with batches of keystrokes.

The format is the protocol of Harbor's agent terminus-2. Errors and warnings have the same text as in terminus-2. If the
meaning of a malformed reply is clear, the reply is accepted and the LLM gets a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

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
        text: Text to type, or the name of a key (see `terminal_screen.as_typed`).
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
