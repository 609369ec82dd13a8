"""Functions that run commands as root in the container of a task, and raise an error if a command fails.

They prepare directories in which an agent may have left files, links or processes to disturb the tests.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from ares_exp.containers.container import Container, Shell, User
from ares_exp.errors import ContainerError, EpisodeError, VerifierError

PLAIN_SHELL: Shell = "sh -c"
"""A shell that does not read profile files, because an agent may have changed these files."""
CLEAR_TIMEOUT_SEC = 600.0
"""Time limit in seconds for emptying directories. It is long, because an agent may have left millions of files."""
_CLEAR = """\
is_empty() { [ -d $1 ] && [ ! -L $1 ] && [ "$(ls -A $1 | wc -c)" -eq 0 ]; }
gone() { [ ! -e $1 ] && [ ! -L $1 ]; }
clear() { rm -rf $1 2>/dev/null; gone $1 || is_empty $1 || mv $1 $1.left-$$; }
"""
"""Shell functions. `clear PATH` removes a path. A mount point is only emptied; other remains are renamed."""
_RESERVE = """\
umask 022
close() { [ -O $1 ] || chown 0:0 $1; }
note() { [ -z "$1" ] || [ "$1" = '0:0 755' ] || { rm -rf $above/.owner && echo "$1" >$above/.owner; }; }
if [ -d $above ]; then
  before=$(stat -c '%u:%g %a' $above)
  { close $above && chmod 755 $above && note "$before"; } 2>/dev/null || clear $above
fi
if [ -d $folder ] && [ ! -L $folder ]; then close $folder && chmod 700 $folder; fi
clear $folder || exit 1
if ! mkdir -p $folder 2>/dev/null; then clear $above; mkdir -p $folder; fi &&
chmod a+rx / $above && chmod 755 $folder
"""
"""Script of `reserve_log_dir`. It makes root the owner of the parent directory, so that other users cannot replace its
entries. The file `.owner` in the parent directory records the previous owner and mode."""
_RELEASE = """\
owned=$above/.owner
[ -f $owned ] && [ ! -L $owned ] || exit 0
read -r owner mode <$owned && rm -f $owned && chown "$owner" $above && chmod "$mode" $above
"""
STOP_TIMEOUT_SEC = 30.0
"""Time limit in seconds for stopping the processes of a container, which may start new processes meanwhile."""
_OUR_PROCESSES = Path("/proc/self/ns/pid")
_STOP = """\
case $(readlink /proc/self/ns/pid) in "" | "$ours") echo "it shares them with this machine"; exit 1 ;; esac
status() { while read -r key value _; do case $key in State:) state=$value ;; PPid:) above=$value ;; esac; done; }
pid=$$ kept=" "
while [ "$pid" -gt 1 ]; do
  kept="$kept$pid "
  status </proc/$pid/status
  pid=$above
done
left=yes
while [ $left = yes ]; do
  left=no
  for process in /proc/[0-9]*; do
    pid=${process#/proc/} state=gone above=0
    status <$process/status
    case $kept in *" $pid "* | *" $above "*) continue ;; esac
    case "$pid $state" in "1 "* | *" gone" | *" X" | *" Z") continue ;; esac
    kill -9 $pid && left=yes
  done
done 2>/dev/null
exit 0
"""
"""Script of `stop_processes`. It spares process 1, the processes that run this script, and children of the latter. All
other processes are killed. The loop itself starts no processes."""


async def as_root(
    container: Container,
    command: str,
    *,
    purpose: str,
    cwd: str | None = "/",
    timeout_sec: float = 60.0,
    failure: type[EpisodeError] = ContainerError,
) -> str:
    """Runs a shell command as root, and returns its output.

    If the command fails, raises `failure` with a message such as "Could not make /logs as root", where `purpose` is
    "make /logs". If `cwd` is `None`, the command runs in the working directory of the container.
    """
    result = await container.exec(command, cwd=cwd, user="root", timeout_sec=timeout_sec, shell=PLAIN_SHELL)
    if result.exit_code != 0:
        ending = "took too long" if result.timed_out else f"exit code {result.exit_code}"
        raise failure(f"Could not {purpose} as root ({ending}): {result.output.strip()}{fork_hint(result.output)}")
    return result.output


def fork_hint(output: str) -> str:
    """Returns a hint about the process limit if a shell reports that it could not start a process; otherwise ""."""
    if not re.search(r"\bfork\b", output):
        return ""
    return (
        ". Processes that the agent left behind use up the container's process limit, as a fork bomb does. Set "
        "container.pids_limit to a larger number if the task needs more processes."
    )


async def stop_processes(container: Container) -> None:
    """Kills the processes that an agent has left in a container.

    Shells that ares_exp keeps open in the container are also killed. They are opened again when they are needed.

    Raises:
        VerifierError: Some processes are still running, or the container uses the process namespace of this machine.
    """
    ours = str(_OUR_PROCESSES.readlink()) if _OUR_PROCESSES.is_symlink() else "none"
    command = f"ours='{ours}'\n{_STOP}"
    result = await container.exec(command, user="root", cwd="/", timeout_sec=STOP_TIMEOUT_SEC, shell=PLAIN_SHELL)
    if result.exit_code != 0:
        why = f"some are still running after {STOP_TIMEOUT_SEC:g} s" if result.timed_out else result.output.strip()
        raise VerifierError(
            f"The processes of the container could not be stopped: {why}{fork_hint(why) or '.'} Remove "
            "`stop_processes` from [metadata] of the task.toml, or use another container."
        )


async def make_log_dirs(container: Container, *folders: str) -> None:
    """Creates empty directories to which every user can write.

    Existing directories are emptied, even if other users own them. A file at the path of a directory or of its parent
    directory is replaced.
    """
    above = " ".join(dict.fromkeys(map(posixpath.dirname, folders)))
    listing = " ".join(folders)
    made = (
        f"for d in {listing}; do clear $d || exit 1; done\n"
        f"if ! mkdir -p {listing} 2>/dev/null; then for d in {above}; do clear $d; done; mkdir -p {listing}; fi &&\n"
        f"chmod a+rx / {above} && chmod 777 {listing}"
    )
    await as_root(container, _CLEAR + made, purpose=f"make {listing}", timeout_sec=CLEAR_TIMEOUT_SEC)


async def reserve_log_dir(container: Container, folder: str, user: User | None) -> None:
    """Creates an empty directory to which only `user` and root can write. An existing directory is replaced.

    Processes of other users cannot replace the directory, because its parent belongs to root until `release_log_dir`.
    """
    names = f"folder={folder} above={posixpath.dirname(folder)}\n"
    await as_root(
        container, _CLEAR + names + _RESERVE, purpose=f"reserve {folder} for the tests", timeout_sec=CLEAR_TIMEOUT_SEC
    )
    found = await container.exec("id -u", cwd="/", user=user, timeout_sec=60, shell=PLAIN_SHELL)
    number = found.output.strip()
    if found.exit_code != 0 or not number.isdecimal():
        raise ContainerError(
            f"Expected `id -u` to print the numeric id of the user {user!r}, got: {number}{fork_hint(number)}"
        )
    if number != "0":
        await as_root(container, f"chown {number} {folder}", purpose=f"make the user {number} the owner of {folder}")


async def release_log_dir(container: Container, folder: str) -> None:
    """Gives the parent directory of `folder` the owner and mode that it had before `reserve_log_dir`."""
    await as_root(container, f"above={posixpath.dirname(folder)}\n{_RELEASE}", purpose=f"release {folder}")


async def empty(container: Container, folder: str) -> bool:
    """Empties the directory `folder` in the container. A file at this path is replaced with an empty directory.

    If the path does not exist, nothing is created. Returns whether something was removed.
    """
    command = f"gone {folder} || {{ is_empty {folder} || echo left; clear {folder} && mkdir -p {folder}; }}"
    left = await as_root(container, _CLEAR + command, purpose=f"empty {folder}", timeout_sec=CLEAR_TIMEOUT_SEC)
    return bool(left.strip())
