"""What a user is told about a build that failed, whoever built."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from ares_exp.errors import ContainerStartError

LAST_LINES = 20
_MAX_LINE_CHARS = 500
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def build_failure(context_dir: Path, reason: str, instruction: str, output: Iterable[str]) -> ContainerStartError:
    """The error with the failing instruction and the end of its output, free of what would drive a terminal."""
    plain = (_COLOUR.sub("", line) for line in output)  # the engine itself paints stderr red
    lines = (line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]}…" for line in plain if line)
    shown = "\n".join(lines) or "(no output)"
    message = (
        f"The image of {context_dir} could not be built: {reason.strip().rstrip('.')}.\n"
        f"Failing instruction: {instruction or '(none)'}\nLast lines of its output:\n{shown}"
    )
    return ContainerStartError(
        "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in message)
    )
