"""Replies of the terminal agent's LLM: the commands and errors that terminus-2 has for the same text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ares_exp.agents.terminal_reply import Keys, TerminalReply, read_reply
from ares_exp.agents.terminal_screen import as_typed

RECORDED = Path(__file__).parents[2] / "data" / "terminus_replies.json"
"""Replies, and how Harbor's parsers read them (its field `source`)."""

LS = {"keystrokes": "ls\n", "duration": 0.5}


def reply(**given: Any) -> dict[str, Any]:
    return {"analysis": 'A {brace} and a "quote".', "plan": "p", "commands": [LS], **given}


def as_recorded(read: TerminalReply) -> dict[str, Any]:
    commands = [[keys.text, keys.seconds] for keys in read.commands]
    warnings = list(read.warnings)
    return {"commands": commands, "is_complete": read.is_complete, "error": read.error, "warnings": warnings}


def without_parser(fields: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the words of Python's JSON parser, which differ between versions."""
    return {**fields, "error": re.sub(r"^(Invalid JSON: ).*?(?= \| Content: )", r"\1", fields["error"])}


def test_replies_are_read_as_harbor_reads_them() -> None:
    recorded = json.loads(RECORDED.read_text())["replies"]
    assert len(recorded) > 30
    for one in recorded:
        found = as_recorded(read_reply(one["reply"]))
        assert without_parser(found) == without_parser({key: one[key] for key in found})


def test_a_reply_in_the_form() -> None:
    read = read_reply(json.dumps(reply(commands=[LS, {"keystrokes": "C-c", "duration": 3}], task_complete=True)))
    assert read.commands == (Keys("ls\n", 0.5), Keys("C-c", 3.0))
    assert (read.is_complete, read.error, read.warnings, read.feedback) == (True, "", (), "")


TEXTS: dict[str, tuple[str, tuple[Keys, ...], str]] = {
    "text before": (f"I look. {json.dumps(reply())}", (Keys("ls\n", 0.5),), "- Extra text detected before JSON object"),
    "fenced": (
        f"```json\n{json.dumps(reply(), indent=1)}\n```",
        (Keys("ls\n", 0.5),),
        "- Extra text detected before JSON object\n- Extra text detected after JSON object",
    ),
    "two objects": (json.dumps(reply()) * 2, (Keys("ls\n", 0.5),), "- Extra text detected after JSON object"),
    "a brace is missing": (
        json.dumps(reply())[:-1],
        (Keys("ls\n", 0.5),),
        "- AUTO-CORRECTED: Fixed incomplete JSON by adding missing closing brace - please fix this in future responses",
    ),
    "an odd quote before": (
        f'5" {json.dumps({"analysis": "a", "plan": "p", "commands": []})}',
        (),
        "- AUTO-CORRECTED: Extracted JSON from mixed content - please fix this in future responses",
    ),
    "no newline between commands": (
        json.dumps(reply(commands=[{"keystrokes": "a", "duration": 1}, {"keystrokes": "", "duration": 2}])),
        (Keys("a", 1.0), Keys("", 2.0)),
        "- Command 1 should end with newline when followed by another command. Otherwise the two commands will be "
        "concatenated together on the same line.",
    ),
    "fields": (
        json.dumps({"commands": [{"keystrokes": "x", "wait": 1}], "plan": "p", "analysis": 3, "task_complete": 0}),
        (Keys("x", 1.0),),
        "- Field 'analysis' should be a string\n"
        "- Fields appear in wrong order. Found: commands → plan → analysis, expected: analysis → plan → commands\n"
        "- Field 'task_complete' should be a boolean or string\n"
        "- Command 1: Missing duration field, using default 1.0\n"
        "- Command 1: Unknown fields: wait",
    ),
    "a duration that is none": (
        json.dumps(reply(commands=[{"keystrokes": "x", "duration": "long"}])),
        (Keys("x", 1.0),),
        "- Command 1: Invalid duration value, using default 1.0",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_not_quite_in_the_form_is_read_with_a_warning(name: str) -> None:
    text, commands, warnings = TEXTS[name]
    read = read_reply(text)
    assert (read.commands, read.error) == (commands, "")
    assert read.feedback == f"WARNINGS: {warnings}"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "No valid JSON found in response"),
        ("I am done.", "No valid JSON found in response"),
        ('{"analysis": "a"}', "Missing required fields: plan, commands"),
        ('{"analysis": a}', "Invalid JSON: Expecting value: line 1 column 14 (char 13) | Content: '{\"analysis\": a}'"),
        (json.dumps(reply(commands={})), "Field 'commands' must be an array"),
        (json.dumps(reply(commands=[LS, "ls"])), "Command 2 must be an object"),
        (json.dumps(reply(commands=[{"duration": 1}])), "Command 1 missing required 'keystrokes' field"),
        (json.dumps(reply(commands=[{"keystrokes": ["ls"]}])), "Command 1 'keystrokes' must be a string"),
        (json.dumps(reply())[:-20], "No valid JSON found in response"),
        ("{" * 5000 + "}" * 5000, "Invalid JSON"),
    ],
)
def test_what_cannot_be_used_has_an_error_and_no_commands(text: str, error: str) -> None:
    read = read_reply(text)
    assert read.error.startswith(error)
    assert (read.commands, read.is_complete) == ((), False)


def test_wrong_commands_of_a_reply_that_says_it_is_done_are_a_warning() -> None:
    read = read_reply(json.dumps(reply(commands=["ls"], task_complete="yes")))
    assert (read.commands, read.is_complete, read.error) == ((), True, "")
    assert read.warnings == ("Command 1 must be an object",)


@pytest.mark.parametrize(
    ("keys", "typed"),
    [("ls\n", "ls\r"), ("C-c", "\x03"), ("C-d", "\x04"), ("^C", "\x03"), ("M-x", "\x1bx"), ("Escape", "\x1b"),
     ("Up", "\x1b[A"), ("F5", "\x1b[15~"), ("C-c\n", "C-c\r"), ("Update", "Update"), ("", ""), ("C-", "C-")],
)  # fmt: skip
def test_keys(keys: str, typed: str) -> None:
    assert as_typed(keys, application_cursor=False) == typed


def test_cursor_keys_of_programs_that_ask_for_others() -> None:
    assert as_typed("Up", application_cursor=True) == "\x1bOA"
