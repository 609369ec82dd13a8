"""The `sh` source that a channel's shell is fed: a handshake, one framed command, the killing of process trees.

Every script prints the marks `start`, an exit code and `end` (see `MarkParser`). POSIX `sh` only: the box may have
nothing but busybox.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass

EXEC_ID_VARIABLE = "ARES_EXEC"
"""Every process of a command carries its id in this environment variable; killing a tree finds them by it."""

# One argument of exec() is limited to 128 KiB by the kernel; a longer command travels as a here-document.
_MAX_ARGUMENT_BYTES = 100_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class BoxShells:
    """What the image offers, as absolute paths; empty when absent."""

    bash: str = ""
    setsid: str = ""


def handshake(key: str) -> str:
    """Prints `bash path|setsid path` where other scripts print an exit code."""
    return f'printf "\\036{key} start\\036\\036{key} $(command -v bash)|$(command -v setsid)\\036\\036{key} end\\036"\n'


def parse_handshake(word: str) -> BoxShells:
    """Reads what `handshake` printed."""
    bash, _, setsid = word.partition("|")
    return BoxShells(bash=bash, setsid=setsid)


def check_arguments(command: str, cwd: str | None, env: Mapping[str, str]) -> None:
    """Refuses what no shell can be given.

    Raises:
        ValueError: A NUL in `command`, `cwd` or `env`, or a variable's name that is not an identifier.
    """
    for what, text in [("command", command), ("cwd", cwd or ""), *((f"env[{name!r}]", env[name]) for name in env)]:
        if "\0" in text:
            raise ValueError(f"Expected {what} without NUL characters: a process cannot receive them.")
    for name in env:
        if not _NAME.fullmatch(name):
            raise ValueError(f"Expected an identifier as the name of an environment variable, got {name!r}.")


def framed_command(
    command: str, *, key: str, exec_id: str, shells: BoxShells, cwd: str | None, env: Mapping[str, str], login: bool
) -> str:
    """One command in its own session, between marks.

    Its output passes through `cat`, so that the exit code comes in order after all that the command itself printed,
    while `end` comes only when nobody holds the pipe any more: background processes included.
    """
    lines = [*_change_directory(cwd), *(f"export {name}={shlex.quote(env[name])}" for name in env)]
    lines += [f"export {EXEC_ID_VARIABLE}={exec_id}", _run_shell(command, key, shells, login)]
    body = "\n".join(lines)
    return (
        f"printf '\\036{key} start\\036'\n"
        f"( ( {body}\n) </dev/null 2>&1; printf '\\036{key} %d\\036' $? ) 2>/dev/null | cat\n"
        f"printf '\\036{key} end\\036'\n"
    )


def _change_directory(cwd: str | None) -> list[str]:
    if cwd is None:
        return []
    path = cwd if posixpath.isabs(cwd) else f"./{cwd}"
    complaint = shlex.quote(f"cannot change to the working directory {cwd!r}: missing, no directory, or not accessible")
    return [f"cd -- {shlex.quote(path)} 2>/dev/null || {{ echo {complaint}; exit 126; }}"]


def _run_shell(command: str, key: str, shells: BoxShells, login: bool) -> str:
    shell = f"exec {shlex.quote(shells.setsid)}" if shells.setsid else "exec"
    shell += f" {shlex.quote(shells.bash or 'sh')} {'-lc' if login else '-c'}"
    if len(command.encode("utf-8", "surrogateescape")) <= _MAX_ARGUMENT_BYTES:
        return f"{shell} {shlex.quote(command)}"
    # The words of `eval` are expanded before its redirection closes the descriptor for what it runs.
    return f"{shell} 'eval \"$(cat <&3)\" 3<&-' 3<<'{key}'\n{command}\n{key}"


def kill_trees(exec_ids: Collection[str], *, key: str) -> str:
    """Kills every process of these commands: SIGSTOP until no new one turns up, then SIGKILL, until none is left.

    A process belongs to them when its environment says so, when its parent does, or when a session leader of them
    leads it (`setsid`, double forks and daemons are found by the first, a program that cleared its environment by the
    others). Builtins only: where the box is out of processes, nothing could be forked. Prints 0 when none is left.
    """
    pattern = "|".join(f"*{EXEC_ID_VARIABLE}={exec_id}*" for exec_id in sorted(exec_ids))
    return f"printf '\\036{key} start\\036'\n{_KILL.replace('PATTERN', pattern)}\n" + (
        f"printf '\\036{key} %d\\036\\036{key} end\\036' $?\n"
    )


# Names begin with "_" because the shell goes on to run commands: a variable of the box must not be overwritten.
_KILL = r"""{
_owned() {
  while IFS= read -r _line || [ -n "$_line" ]; do
    case $_line in PATTERN) return 0;; esac
  done <"/proc/$1/environ"
  return 1
}
_tree=' ' _sessions=' ' _round=0 _live=
while [ $_round -lt 100 ]; do
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
