"""A shell that runs a program, and kills it when the process that started the shell ends, even by `kill -9`.

The shell reads from a pipe that this process holds open. When this process ends, the kernel closes the pipe.
"""

from __future__ import annotations

from collections.abc import Sequence

# 3 is the program's stdin, 4 the pipe. Reopened by path, because shells redirect only single-digit descriptors.
_SHELL = """
pipe=$1
shift
if [ -n "$pipe" ]; then exec 4<"$pipe" 3<&0; else exec 4<&0 3</dev/null; fi
exec </dev/null
"$@" <&3 3<&- 4<&- &
program=$!
{ read -r _; kill -9 0; } <&4 >/dev/null 2>&1 3<&- 4<&- &
exec 3<&- 4<&-
wait $program
"""


def while_we_live(command: Sequence[str], *, pipe: int | None = None) -> list[str]:
    """Returns a command line that runs `command`, and kills the program's process group when the pipe is closed.

    The command line exits with the program's exit code. Start it with `start_new_session=True`, so that it leads a
    process group. Also close the pipe when the program has ended: a helper process of the command line waits until
    then.

    Args:
        command: The program and its arguments.
        pipe: Descriptor of the pipe's read end, which the command line must inherit (`pass_fds`). The program then
            inherits our stdin. `None`: the command line's stdin is the pipe, and the program has no input.
    """
    return ["/bin/sh", "-c", _SHELL, "sh", "" if pipe is None else f"/dev/fd/{pipe}", *command]
