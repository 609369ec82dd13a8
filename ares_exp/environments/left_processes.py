"""Processes that commands have left running in a container."""

from __future__ import annotations

from ares_exp.containers.container import Container
from ares_exp.containers.shell_channel import EXEC_ID_VARIABLE

# One a line: number and command line. Not itself.
_PROCESSES = f"""
files=$(grep -sl {EXEC_ID_VARIABLE}= /proc/[0-9]*/environ)
for file in $(grep -sL "{EXEC_ID_VARIABLE}=${EXEC_ID_VARIABLE}" $files /dev/null); do
  [ "$file" = /dev/null ] || {{
    dir=${{file%/environ}}
    command=$(tr '\\0\\n' '  ' <"$dir/cmdline") && echo "${{dir#/proc/}} $command"
  }} 2>/dev/null
done
exit 0
"""
_MAX_PROCESSES = 100


async def left_processes(container: Container) -> list[str]:
    """Lists the processes that commands have left running, a line each; those that cannot be found out are left out."""
    listed = await container.exec(_PROCESSES, cwd="/", user="root", timeout_sec=10.0, shell="sh -c")
    return listed.output.splitlines()[:_MAX_PROCESSES] if listed.exit_code == 0 else []
