"""Functions that print text and tables to a terminal. They escape control characters in untrusted text."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_COLUMNS = 120
HEAD_LINES, TAIL_LINES = 12, 4
HEAD_CHARS, TAIL_CHARS = 400, 100
JOINERS = "\u200c\u200d"
"""Invisible characters that occur in words and emojis. They are harmless, so they are not escaped."""
_UNBROKEN = re.compile(r" (?=[·|] )|(?<=ares-exp) |(?<=\d) (?=\[)|(?<=,) (?=[-\d.e+]+\])")
"""Pattern of spaces at which no line is broken: before `·` and `|`, after `ares-exp`, and before or in an interval."""
_BYTES = ("B", "kB", "MB", "GB", "TB")


def make_console(pager: IO[str] | None = None) -> Console:
    """Creates a rich console for stdout or `pager`. Uses 120 columns without colours if stdout is not a terminal."""
    from rich.console import Console

    class OurConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # the command line handles this error; rich would exit with 1

    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    is_terminal = None
    if pager is not None:
        width, is_terminal = OurConsole().width, True
    return OurConsole(file=pager, width=width, force_terminal=is_terminal, highlight=False, markup=False, emoji=False)


def printable(text: str) -> str:
    """Escapes characters that could manipulate the terminal, such as control characters or bidirectional marks."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(map(_shown, text))


def shown_path(path: Path) -> Path:
    """Returns a path as it is shown to the user: relative if it is below the working directory."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def one_line(text: str, limit: int = 100) -> str:
    """Formats `text` as one printable line. Shortens it to `limit` characters, with an ellipsis at the end."""
    flat = printable(" ".join(text[: 4 * limit].split()))
    return flat if len(flat) <= limit else f"{flat[: limit - 1]}…"


def collapsed(text: str, *, full: bool = False, head: int = HEAD_LINES, tail: int = TAIL_LINES) -> list[str]:
    """Splits `text` into printable lines. Unless `full`, omits the middle of a long text and of long lines."""
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
    if char in "\n\t" or char in JOINERS or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return char
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def separator(stream: TextIO) -> str:
    """Returns the separator between facts on a line: ` · `, or ` | ` if the encoding of `stream` has no `·`."""
    try:
        "·".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return " | "
    return " · "


def format_duration(seconds: float) -> str:
    """Formats a duration: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def format_number(value: float) -> str:
    """Formats a number with two decimals, or four if it is below 0.01. From 10,000, uses three significant digits."""
    if abs(value) >= 10_000:
        return f"{value:.3g}"
    return f"{value:.2f}" if value == 0 or abs(value) >= 0.01 else f"{value:.4f}"


def format_size(count: int) -> str:
    """Formats a number of bytes with a unit, such as `1.5 MB`."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_BYTES) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.{0 if unit == 0 or value >= 99.95 else 1}f} {_BYTES[unit]}"


def first_of(names: Sequence[str], most: int) -> str:
    """Lists at most `most` names, such as `a, b and 3 more`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def count_of(number: int, thing: str, things: str | None = None) -> str:
    """Formats a number with a noun, such as `1 episode` or `2,000 episodes`. `things` is an irregular plural."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def draw(table: Table, stream: TextIO, *, width: int | None = None) -> str:
    """Renders a table as text for the width and colours of `stream`. Uses no colours if NO_COLOR is set."""
    from rich.console import Console

    color_system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(file=stream, color_system=color_system, highlight=False, width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def width_of(stream: TextIO) -> int:
    """Returns the width for output to `stream`: the environment variable COLUMNS, the terminal's width, or 80."""
    from rich.console import Console

    return Console(file=stream).width


def wrapped(text: str, stream: TextIO) -> str:
    """Wraps `text` to the width of `stream`, as `wrap` does. Returns it unchanged if `stream` is not a terminal."""
    return "\n".join(wrap(text, width_of(stream))) if stream.isatty() else text


def wrap(text: str, width: int, *, max_lines: int | None = None) -> list[str]:
    """Wraps each line of `text` to `width` characters at spaces. Continuation lines are indented by two more spaces."""
    parts = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip(" "))] + "  "
        parts += textwrap.wrap(
            _UNBROKEN.sub("\xa0", line),
            max(width, 20),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            max_lines=max_lines,
            placeholder=" …",
        ) or [""]
    return [part.replace("\xa0", " ") for part in parts]


def write(stream: TextIO, text: str) -> None:
    """Writes `text` to `stream`. A `?` replaces each character that the stream's encoding does not support."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))


def print_warning(message: str) -> None:
    """Prints a warning on one line of stderr, with the prefix `warning:`."""
    write(sys.stderr, f"warning: {one_line(message, 2_000)}\n")


def print_error(message: str) -> None:
    """Prints an error message to stderr, with the prefix `error:`."""
    width = 100 if sys.stderr.isatty() else 10_000
    paragraph = "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in message.splitlines())
    sys.stderr.write(f"error: {paragraph}\n")


COLUMN_GAP = 3


def columns_that_fit(
    columns: Mapping[str, Sequence[str]], width: int, *, leave_out: Sequence[str]
) -> dict[str, Sequence[str]]:
    """Selects the columns of a table that fit into `width` characters.

    If they do not all fit, those columns whose names are in `leave_out` are removed, in this order, until the others
    fit.
    """
    fitting = dict(columns)
    widths = {name: max(map(len, (name, *cells))) + COLUMN_GAP for name, cells in columns.items()}
    for name in leave_out:
        if name in fitting and sum(widths.values()) > width:
            del fitting[name], widths[name]
    return fitting


def make_table(columns: Mapping[str, Sequence[str]], *, texts: Collection[str]) -> Table:
    """Creates a table of printable cells. Wraps the columns whose names are in `texts`, and right-aligns the others."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        if name in texts:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))
    return table


def print_table(
    console: Console, columns: Mapping[str, Sequence[str]], *, texts: Collection[str], leave_out: Sequence[str] = ()
) -> None:
    """Prints a table on a console (see `make_table`), with the columns that fit (see `columns_that_fit`)."""
    console.print(make_table(columns_that_fit(columns, console.width, leave_out=leave_out), texts=texts))
