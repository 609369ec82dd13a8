"""Text from anywhere on a terminal: whatever it holds is shown, and none of it is obeyed."""

from __future__ import annotations

import sys
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 120
HEAD_LINES, TAIL_LINES = 12, 4
HEAD_CHARS, TAIL_CHARS = 400, 100
JOINERS = "\u200c\u200d"
"""Invisible, but harmless, and parts of words and pictures."""


def make_console() -> Console:
    """A console on stdout: in a pipe without colours and 120 columns wide."""
    from rich.console import Console

    class OurConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # the command line knows what to do; rich would exit with 1

    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return OurConsole(width=width, highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """`text` with everything escaped that a terminal would obey or hide: control characters, directions, halves."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(map(_shown, text))


def one_line(text: str, limit: int = 100) -> str:
    """The beginning of `text` on one line."""
    flat = printable(" ".join(text[: 4 * limit].split()))
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"


def collapsed(text: str, *, full: bool = False, head: int = HEAD_LINES, tail: int = TAIL_LINES) -> list[str]:
    """The lines of `text`, printable; of a long one the middle is left out, and of its long lines theirs."""
    lines = text.split("\n")
    if not full and len(lines) > head + tail + 1:
        left_out = lines[head:-tail]
        count = sum(map(len, left_out)) + len(left_out)
        note = f"[… {len(left_out):,} lines, {count:,} characters …]"
        lines = [*lines[:head], note, *lines[-tail:]]
    return [printable(line) if full else printable(_cut(line)) for line in lines]


def _cut(line: str) -> str:
    if len(line) <= HEAD_CHARS + TAIL_CHARS + 40:
        return line
    return f"{line[:HEAD_CHARS]} [… {len(line) - HEAD_CHARS - TAIL_CHARS:,} characters …] {line[-TAIL_CHARS:]}"


def _shown(char: str) -> str:
    if char in "\n\t" or char in JOINERS:
        return char
    category = unicodedata.category(char)
    if category in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return char.encode("unicode_escape", "surrogatepass").decode("ascii")
    return char
