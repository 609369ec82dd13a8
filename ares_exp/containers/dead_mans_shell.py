"""A shell beside a program of ours, which ends the program when we end, by `kill -9` too.

It waits for the end of a pipe whose writing end only we hold. The kernel closes that with us, whatever our end was.
"""

from __future__ import annotations

from collections.abc import Sequence

# 3 is what the program reads, 4 the pipe. What is opened by its path is the same pipe: shells know single digits alone.
_SHELL = """
pipe=$1 at_end=$2
shift 2
if [ -n "$pipe" ]; then exec 4<"$pipe" 3<&0; else exec 4<&0 3</dev/null; fi
exec </dev/null
"$@" <&3 3<&- 4<&- &
program=$!
{ read -r _; eval "$at_end"; kill -9 0; } <&4 >/dev/null 2>&1 3<&- 4<&- &
exec 3<&- 4<&-
wait $program
"""


def while_we_live(command: Sequence[str], *, pipe: int | None = None, at_end: str = "") -> list[str]:
    """The command line that runs `command`, and kills its own process group at the end of a pipe.

    Its exit code is the program's. It has to be the first of a process group (`start_new_session=True`), and its owner
    has to close the pipe in any case: else the shell waits beside a program that has ended.

    Args:
        command: The program and its arguments.
        pipe: The reading end, handed on under this number (`pass_fds`); the program reads our stdin then. `None`: the
            pipe is stdin itself, and the program reads nothing.
        at_end: What the shell does before it kills, in shell.
    """
    return ["/bin/sh", "-c", _SHELL, "sh", "" if pipe is None else f"/dev/fd/{pipe}", at_end, *command]
