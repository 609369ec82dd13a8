"""A shell that kills a child program when this process ends, also by `kill -9`.

It waits for the end of a pipe whose writing end only this process holds: the kernel closes it with the process.
"""

from __future__ import annotations

from collections.abc import Sequence

# 3 is the program's stdin, 4 the pipe. It is reopened by its path, as shells redirect single-digit descriptors only.
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
    """Returns the command line that runs `command` and kills its process group at the end of a pipe.

    Its exit code is the program's. It has to lead a process group (`start_new_session=True`), and the caller has to
    close the pipe in any case: else the shell waits on after the program has ended.

    Args:
        command: The program and its arguments.
        pipe: The descriptor of the reading end, passed on (`pass_fds`); the program reads our stdin then. `None`: the
            pipe is stdin itself, and the program reads nothing.
        at_end: Shell source that runs before the kill.
    """
    return ["/bin/sh", "-c", _SHELL, "sh", "" if pipe is None else f"/dev/fd/{pipe}", at_end, *command]
