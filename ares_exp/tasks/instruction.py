"""Functions that read an agent's instruction, and a prior conversation that the agent continues."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import dropwhile
from pathlib import Path
from typing import Any

from ares_exp.errors import ConfigError, TaskError, TrajectoryFormatError
from ares_exp.tasks.verification.link_bounds import LinkBounds

_CANARY = re.compile(r"(?=.*canary)(?:#.*|<!--.*-->)", re.I | re.S)


def strip_canary(text: str) -> str:
    """Removes canary lines, and then blank lines, from the start of a text.

    A canary line marks a file as unsuitable for training data, and is not meant for the agent. It contains the word
    "canary", and is a one-line HTML comment or starts with `#`.
    """
    lines = dropwhile(lambda line: _CANARY.fullmatch(line.strip()), text.split("\n"))
    return "\n".join(dropwhile(lambda line: not line.strip(), lines))


def read_instruction(path: Path, bounds: LinkBounds) -> str:
    """Reads an instruction without its canary lines. Raises `TaskError` if the file is missing or invalid."""
    try:
        return strip_canary(bounds.read_text(path))
    except FileNotFoundError:
        raise TaskError(f"{path}: the file with the agent's instruction is missing.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read as UTF-8 text: {error}.") from None


def read_extra_instruction(path: Path) -> str:
    """Reads the text of a file in `env.extra_instruction_paths`. Raises `ConfigError` if this fails."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a NUL in the path raises ValueError, and is possible in a recorded config
        raise ConfigError(
            f"Expected `env.extra_instruction_paths` to be UTF-8 files, but {path} cannot be read: {error}."
        ) from None


TRAJECTORY = "trajectory.json"


def read_prior_context(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Reads the messages of a prior conversation, oldest first; empty if the file does not exist. Blocking.

    The file is a trajectory in the ATIF format. Its system steps at the start are omitted, because they are the system
    prompt of the recorded agent. If a system step reports that the agent replaced its context (for example, by a
    summary), all earlier messages are omitted, and the conversation starts with the observation in this step.

    Raises:
        TaskError: The file is not a valid ATIF document, or has no conversation.
    """
    if not path.is_file():
        return ()
    from ares_exp.trajectories.exports.atif_messages import validate_atif
    from ares_exp.trajectories.files.line_file import read_lines, read_rest
    from ares_exp.trajectories.records import BROKEN, what_broke

    try:
        with read_lines(path) as lines:
            document = json.loads(read_rest(lines))
        validate_atif(document)
        messages = _messages(document)
    except (OSError, TrajectoryFormatError, *BROKEN) as error:
        what = str(error) if isinstance(error, OSError | TrajectoryFormatError) else f"{what_broke(error)}."
        raise TaskError(f"{path}: {what} The prior context of a task must be a valid ATIF document.") from None
    if not messages:
        raise TaskError(f"{path}: expected an ATIF document with at least one message, found none.")
    return messages


def _messages(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    from ares_exp.llms.request import freeze
    from ares_exp.trajectories.exports.atif_messages import llm_calls, message_of_result, message_of_step

    messages: list[Mapping[str, Any]] = []
    after_prompt = False
    for step in document["steps"]:
        if step["source"] == "system" and _replaces_context(step):
            messages.clear()
        elif step["source"] != "system" or after_prompt:
            messages.append(message_of_step(step))
        after_prompt |= step["source"] != "system"
        calls = {call[0] for call in llm_calls(step)}
        for result in (step.get("observation") or {"results": ()})["results"]:
            if result.get("content") is not None:
                messages.append(message_of_result(result, calls))
    return tuple(map(freeze, messages))


def _replaces_context(step: Mapping[str, Any]) -> bool:
    management = (step.get("extra") or {}).get("context_management")
    return isinstance(management, Mapping) and management.get("boundary") == "replace"
