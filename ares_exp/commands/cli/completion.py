"""Tab completion of commands, flags, paths, runs and tasks. Hydra completes config options and keys.

When the user presses Tab, the shell runs the program with `-sc query=SHELL`, and with the typed line in the environment
variable `COMP_LINE`. The program prints candidates, and the shell offers the candidates that start with the last word.
If there are none, the shell completes file names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ares_exp.commands.cli.flags import FLAGS
from ares_exp.commands.cli.run_command import COMMANDS, parser_of, paths

WITH_PATH = re.compile(r"(resume|replay|branch_from|--config-dir|\S*(path|dir|trajectory))=")
"""Pattern that matches keys and flags whose value is a path."""
WITHOUT_BLANK = 'COMPREPLY=($( compgen -o nospace -o default -W "$choices" -- "$word" ));'
WITH_BLANK = f'{WITHOUT_BLANK}\n        [[ ${{#COMPREPLY[@]}} == 1 && $COMPREPLY != *[=./] ]] && COMPREPLY[0]+=" "'
"""Replacement for the line `WITHOUT_BLANK` in Hydra's completion script, which never adds a space after a candidate.

The new line adds a space if there is only one candidate, and the candidate does not end with `=`, `.` or `/`.
"""


def candidates() -> tuple[list[str], bool]:
    """Returns the candidates for the line in `COMP_LINE`, and whether Hydra has to print its own candidates as well."""
    line = os.environ.get("COMP_LINE", "")
    point = os.environ.get("COMP_POINT", "")  # the position of the cursor, if the shell reports it
    with_program = line[: int(point) if point.isdecimal() else len(line)].split(" ")
    typed = [word for word in with_program[1:-1] if word]
    last = with_program[-1] if len(with_program) > 1 else ""
    if typed and typed[0] in COMMANDS:
        return parser_of(typed[0], typed[0]).candidates(typed[1:], last), False
    if typed[-1:] == ["--config-dir"]:
        return paths(last), False
    if (key := WITH_PATH.match(last)) and (found := paths(last[key.end() :])):
        return [f"{key[0]}{path}" for path in found], False
    if listed := re.match(r"env\.tasks=(.*[\[,])?", last):
        return [f"{listed[0]}{name}" for name in _tasks(typed) if name.startswith(last[listed.end() :])], False
    if last.startswith("-"):
        return [flag for flag in FLAGS if flag.startswith(last)], False
    return ([] if typed else [name for name in COMMANDS if name.startswith(last)]), True


def _tasks(typed: Sequence[str]) -> list[str]:
    """Returns the task names for `env.tasks=`, from the typed `env.path=` folder or, by default, the bundled tasks."""
    from ares_exp.tasks.task_set import SAMPLES

    folders = [Path(word.partition("=")[2]).expanduser() for word in typed if word.startswith("env.path=")]
    return sorted(file.parent.name for file in (folders or [SAMPLES])[-1].glob("*/task.toml"))
