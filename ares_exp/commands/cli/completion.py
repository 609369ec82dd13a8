"""Completion of commands, their words and flags at a press of Tab; Hydra completes options and keys.

A shell runs the program with `-sc query=SHELL`, and what was typed in `COMP_LINE`; what is printed are the candidates,
of which it takes those that start as the last word does. Where there are none it completes names of files.
"""

from __future__ import annotations

import os

from ares_exp.commands.cli.commands import COMMANDS
from ares_exp.commands.cli.flags import FLAGS


def candidates() -> tuple[list[str], bool]:
    """Returns what may follow of what Hydra knows nothing of, and whether Hydra is to be asked, too."""
    line = os.environ.get("COMP_LINE", "")
    with_program = line[: _point(line)].split(" ")
    typed = [word for word in with_program[1:-1] if word]
    last = with_program[-1] if len(with_program) > 1 else ""
    if typed and typed[0] in COMMANDS:
        return [*COMMANDS[typed[0]].candidates(typed[1:], last)], False
    if last.startswith("-"):
        return [flag for flag in FLAGS if flag.startswith(last)], False
    return ([] if typed else [name for name in COMMANDS if name.startswith(last)]), True


def _point(line: str) -> int:
    """Returns where the cursor is; of a shell that does not say it, at the end."""
    point = os.environ.get("COMP_POINT", "")
    return int(point) if point.isdecimal() else len(line)
