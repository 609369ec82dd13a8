"""The `sh` source of a channel's shell: the script server, one command, the kill script.

POSIX `sh` only: the container may have only busybox. The shell reports by marks in the output (see `MarkParser`):
`hello` once; for each script `ready`, `start` and an exit code.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ares_exp.containers.container import Shell

EXEC_ID_VARIABLE = "ARES_EXEC"
"""The environment variable with the command's id, by which the kill script finds its processes."""

# The kernel limits one argument of exec() to 128 KiB; a longer command is sent as a here-document.
_MAX_ARGUMENT_BYTES = 100_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class ShellInfo:
    """The facts that a channel's shell reports of itself.

    Attributes:
        pid: Its process number in the container; 0 if unknown.
        bash: Absolute path of bash; empty where the image has none.
    """

    pid: int = 0
    bash: str = ""


def server(key: str) -> str:
    """Returns the source of the script server, which forks the next script's process ahead of time.

    That process, a shell in its own session with its output piped through `cat`, reads one script from the stream and
    becomes the command: the command's shell replaces it, with the environment (`BASH_ENV` too), line numbers and traces
    of a manual start. `cat` orders the exit code after all output of the command itself, while the server continues
    only when no process holds the pipe any more, background processes included. It forks the next process when it then
    reads a line that is the key, which may be sent as soon as the script has started.
    """
    return _SERVER.replace("KEY", key)


_SERVER = r"""{
_setsid=$(command -v setsid) _bash=$(command -v bash)
printf '\036KEY hello %s|%s\036' $$ "$_bash"
while IFS= read -r _line; do
  [ "$_line" = KEY ] || continue
  { (
    printf '\036KEY ready\036' >&3
    (exec ${_setsid:+"$_setsid"} sh) 2>&1
    printf '\036KEY %d\036' $?
  ) 2>/dev/null | cat 3>&-; } 3>&1
done
}
"""


def parse_hello(word: str) -> ShellInfo:
    """Parses what a shell reports about itself.

    Raises:
        ValueError: As `parse_number`.
    """
    pid, _, bash = word.partition("|")
    return ShellInfo(parse_number(pid) if pid else 0, bash)


def parse_number(word: str) -> int:
    """Parses a process number or an exit code.

    Raises:
        ValueError: It is not a number that a shell would print.
    """
    if not _NUMBER.fullmatch(word):
        raise ValueError(f"Expected a small number, got {word[:40]!r}.")
    return int(word)


def check_arguments(command: str, cwd: str | None, env: Mapping[str, str]) -> None:
    """Refuses arguments that no shell can receive.

    Raises:
        ValueError: A NUL or a lone surrogate in `command`, `cwd` or `env`, or a variable's name that is not an
            identifier.
    """
    for what, text in [("command", command), ("cwd", cwd or ""), *((f"env[{name!r}]", env[name]) for name in env)]:
        if "\0" in text:
            raise ValueError(f"Expected {what} without NUL characters: a process cannot receive them.")
        try:
            text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            found = text[error.start]
            raise ValueError(f"Expected {what} as text that can be encoded, got {found!r} in it.") from None
    for name in env:
        if not _NAME.fullmatch(name):
            raise ValueError(f"Expected an identifier as the name of an environment variable, got {name!r}.")


def command_script(
    key: str,
    info: ShellInfo,
    *,
    command: str,
    exec_id: str,
    cwd: str | None,
    stays: bool = False,
    env: Mapping[str, str],
    shell: Shell,
    stderr: int | None = None,
) -> str:
    """Returns a script that becomes `command`.

    Args:
        key: The channel's.
        info: The channel's shell.
        command: Shell source text.
        exec_id: The id by which the kill script finds the command's processes.
        cwd: Its working directory; `None` is that of the channel's shell.
        stays: Whether it starts in the shell's directory, if that is not `/`, when `cwd` cannot be entered: a directory
            removed meanwhile can then be created again.
        env: Exported to it.
        shell: The shell of the command.
        stderr: A process of the container whose stdout takes the command's stderr; `None` merges both.
    """
    lines = []
    if stderr is not None:
        complaint = "{ echo 'cannot separate stderr: /proc is closed'; exit 126; }"
        lines.append(f"command exec 2>/proc/{stderr}/fd/1 || {complaint}")
    if cwd is not None:
        complaint = f"cannot change to the working directory {cwd!r}: missing, no directory, or not accessible"
        refuse = f"{{ echo {shlex.quote(complaint)}; exit 126; }}"
        if stays:
            refuse = f"case $(pwd -P 2>/dev/null) in /) {refuse} ;; esac"
        lines.append(f"cd -- {shlex.quote(cwd if posixpath.isabs(cwd) else f'./{cwd}')} 2>/dev/null || {refuse}")
    lines += [*(f"export {name}={shlex.quote(env[name])}" for name in env), f"export {EXEC_ID_VARIABLE}={exec_id}"]
    program = "sh" if shell == "sh -c" or not info.bash else info.bash
    become = f"exec {shlex.quote(program)} {'-lc' if shell == 'bash -lc' else '-c'}"
    if len(command.encode("utf-8", "surrogateescape")) <= _MAX_ARGUMENT_BYTES:
        lines.append(f"{become} {shlex.quote(command)} </dev/null")
    else:  # the words of `eval` are expanded before its redirection closes the descriptor for what it runs
        lines.append(f"{become} 'eval \"$(cat <&3)\" 3<&-' </dev/null 3<<'{key}'\n{command}\n{key}")
    return _script(key, "; ".join(lines))  # one line: the command's line numbers then count from 1


def sink_script(*, key: str) -> str:
    """Returns a script that prints the mark `sink` with its process id, and ends when it reads `end_of_sink`.

    Until then, and while other processes have its stdout open, their writes there are its output.
    """
    wait = 'while read -r _line && [ "$_line" != end ]; do :; done'
    return _script(key, f"read -r _pid _ </proc/self/stat; printf '\\036{key} sink %s\\036' $_pid; {wait}")


def end_of_sink(*, key: str) -> str:
    """Returns the input that ends a sink, and the server's line after it, as the sink has read the first one."""
    return f"end\n{key}\n"


def kill_script(exec_ids: Collection[str], pids: Collection[int], *, key: str) -> str:
    """Returns a script that kills every process of these commands, and the processes `pids` with all their descendants.

    It sends SIGSTOP until no new process turns up, then SIGKILL, until no process is left. A process belongs to a
    command if its environment has the id, if its parent belongs to it, or if its session leader does (the first finds
    `setsid`, double forks and daemons, the others a program that cleared its environment). Builtins only: a container
    at its process limit cannot fork. Exit code 0 when no process is left.
    """
    pattern = "|".join(f"*{EXEC_ID_VARIABLE}={exec_id}*" for exec_id in sorted(exec_ids)) or "''"
    doomed = "".join(f"{pid} " for pid in sorted(pids))
    return _script(key, _KILL.replace("PATTERN", pattern).replace("PIDS", doomed))


def _script(key: str, body: str) -> str:
    """Returns one compound command, so that the shell has read all of it when it starts."""
    return f"{{ printf '\\036{key} start %d\\036' $$ >&3; exec 3>&-; {body}\nexit; }}\n"


# Names start with "_" so as not to overwrite a variable of the container.
_KILL = r"""{
_owned() {
  while IFS= read -r _line || [ -n "$_line" ]; do
    case $_line in PATTERN) return 0;; esac
  done <"/proc/$1/environ"
  return 1
}
_tree=' PIDS' _sessions=' PIDS' _round=0 _live=
for _pid in $_tree; do kill -STOP "$_pid"; done
while [ $_round -lt 50 ]; do
  _round=$((_round + 1)) _new= _live=
  for _dir in /proc/[0-9]*; do
    _pid=${_dir#/proc/}
    case $_pid in 1|$$) continue;; esac
    IFS= read -r _stat <"$_dir/stat" || continue
    set -- ${_stat##*) } # state, parent, process group, session
    case $1 in Z|X) continue;; esac
    case $_tree in
    *" $_pid "*) ;;
    *)
      case "$_tree|$_sessions" in *" $2 "*"|"*|*"|"*" $4 "*) ;; *) _owned "$_pid" || continue;; esac
      _tree="$_tree$_pid " _new=1
      [ "$4" != "$_pid" ] || _sessions="$_sessions$_pid "
      kill -STOP "$_pid"
      ;;
    esac
    _live="$_live $_pid"
  done
  [ -n "$_live" ] || break
  [ -n "$_new" ] || kill -KILL $_live
done
[ -z "$_live" ]
} 2>/dev/null"""
