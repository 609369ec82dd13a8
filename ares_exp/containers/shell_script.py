"""The `sh` source that a channel's shell is fed: the server, one command, the killing of process trees.

POSIX `sh` only: the box may have nothing but busybox. Everything that the runner has to know comes as marks in the
output (see `MarkParser`): `hello` once; for each script `ready`, `start` and an exit code.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ares_exp.containers.container import Shell

EXEC_ID_VARIABLE = "ARES_EXEC"
"""Every process of a command carries its id in this environment variable; killing a tree finds them by it."""

# One argument of exec() is limited to 128 KiB by the kernel; a longer command travels as a here-document.
_MAX_ARGUMENT_BYTES = 100_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class BoxShell:
    """What a channel's shell says of itself.

    Attributes:
        pid: Its process in the box; 0 when not known.
        bash: Absolute path; empty where the image has none.
    """

    pid: int = 0
    bash: str = ""


def server(key: str, shell: Shell) -> str:
    """Makes the shell serve scripts: it forks the next one's process ahead, while nobody waits for it.

    That process, a shell in a session of its own with its output already on the way through `cat`, reads one script
    from the stream and becomes the command. It is the one that `shell` names, so that it need not even be replaced;
    but `sh` for login shells, whose profile files must be read when the command begins. `cat` lets the exit code come
    in order after all that the command itself printed, while the server goes on only when nobody holds the pipe any
    more, background processes included. It forks the next when it then reads a line that is the key, which may be sent
    as soon as the script has begun.
    """
    return _SERVER.replace("KEY", key).replace("INNER", '"${_bash:-sh}"' if shell == "bash -c" else "sh")


_SERVER = r"""{
_setsid=$(command -v setsid) _bash=$(command -v bash)
printf '\036KEY hello %s|%s\036' $$ "$_bash"
while IFS= read -r _line; do
  [ "$_line" = KEY ] || continue
  { (
    printf '\036KEY ready\036' >&3
    (exec ${_setsid:+"$_setsid"} INNER) 2>&1
    printf '\036KEY %d\036' $?
  ) 2>/dev/null | cat 3>&-; } 3>&1
done
}
"""


def parse_hello(word: str) -> BoxShell:
    """Reads what follows `hello`."""
    pid, _, bash = word.partition("|")
    return BoxShell(parse_number(pid) if pid else 0, bash)


def parse_number(word: str) -> int:
    """A process number or an exit code.

    Raises:
        ValueError: No number that a shell would print.
    """
    if not _NUMBER.fullmatch(word):
        raise ValueError(f"Expected a small number, got {word[:40]!r}.")
    return int(word)


def check_arguments(command: str, cwd: str | None, env: Mapping[str, str]) -> None:
    """Refuses what no shell can be given.

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
    command: str,
    *,
    key: str,
    box: BoxShell,
    exec_id: str,
    cwd: str | None,
    stays: bool = False,
    env: Mapping[str, str],
    shell: Shell,
    in_place: bool,
    stderr: int | None = None,
) -> str:
    """A script that becomes `command`.

    Args:
        command: Shell source text.
        key: The channel's.
        box: What the channel's shell said of itself.
        exec_id: By which the command's processes are known.
        cwd: Where it starts; `None` is where the channel's shell stands.
        stays: Whether it starts where the shell stands, other than `/`, if `cwd` cannot be entered: in a directory that
            was removed meanwhile, it can be made anew.
        env: Exported to it.
        shell: What reads it.
        in_place: Whether that is the shell that the script is read by.
        stderr: A process of the box whose stdout takes the command's stderr; `None` leaves both together.
    """
    lines = [] if stderr is None else [_redirect_stderr(stderr)]
    lines += [*_change_directory(cwd, stays), *(f"export {name}={shlex.quote(env[name])}" for name in env)]
    lines += [f"export {EXEC_ID_VARIABLE}={exec_id}", _become(command, key, box, shell, in_place=in_place)]
    return _script(key, "; ".join(lines))  # one line: the command's own then counts from 1


def sink_script(*, key: str) -> str:
    """A script that prints the mark `sink` with its process id, and ends when it gets `end_of_sink`.

    Until then, and as long as others have opened its stdout, what they write there is its output.
    """
    wait = 'while read -r _line && [ "$_line" != end ]; do :; done'
    return _script(key, f"read -r _pid _ </proc/self/stat; printf '\\036{key} sink %s\\036' $_pid; {wait}")


def end_of_sink(*, key: str) -> str:
    """Ends a sink; the server's line comes after it, since the sink has read the first."""
    return f"end\n{key}\n"


def kill_script(exec_ids: Collection[str], pids: Collection[int], *, key: str) -> str:
    """A script that kills every process of these commands, and the processes `pids` with all below them.

    SIGSTOP until no new one turns up, then SIGKILL, until none is left. A process belongs to a command when its
    environment says so, when its parent does, or when a session leader of the command leads it (`setsid`, double forks
    and daemons are found by the first, a program that cleared its environment by the others). Builtins only: where the
    box is out of processes, nothing could be forked. Exit code 0 when none is left.
    """
    pattern = "|".join(f"*{EXEC_ID_VARIABLE}={exec_id}*" for exec_id in sorted(exec_ids)) or "''"
    doomed = "".join(f"{pid} " for pid in sorted(pids))
    return _script(key, _KILL.replace("PATTERN", pattern).replace("PIDS", doomed))


def _script(key: str, body: str) -> str:
    """One compound command, so that all of it has been read when it begins."""
    return f"{{ printf '\\036{key} start %d\\036' $$ >&3; exec 3>&-; {body}\nexit; }}\n"


def _redirect_stderr(sink: int) -> str:
    return f"command exec 2>/proc/{sink}/fd/1 || {{ echo 'cannot separate stderr: /proc is closed'; exit 126; }}"


def _change_directory(cwd: str | None, stays: bool) -> list[str]:
    if cwd is None:
        return []
    path = cwd if posixpath.isabs(cwd) else f"./{cwd}"
    complaint = shlex.quote(f"cannot change to the working directory {cwd!r}: missing, no directory, or not accessible")
    refuse = f"{{ echo {complaint}; exit 126; }}"
    if stays:
        refuse = f"case $(pwd -P 2>/dev/null) in /) {refuse} ;; esac"
    return [f"cd -- {shlex.quote(path)} 2>/dev/null || {refuse}"]


def _become(command: str, key: str, box: BoxShell, shell: Shell, *, in_place: bool) -> str:
    if in_place:
        return f"exec </dev/null; eval {shlex.quote(command)}"
    program = "sh" if shell == "sh -c" or not box.bash else box.bash
    words = f"exec {shlex.quote(program)} {'-lc' if shell == 'bash -lc' else '-c'}"
    if len(command.encode("utf-8", "surrogateescape")) <= _MAX_ARGUMENT_BYTES:
        return f"{words} {shlex.quote(command)} </dev/null"
    # The words of `eval` are expanded before its redirection closes the descriptor for what it runs.
    return f"{words} 'eval \"$(cat <&3)\" 3<&-' </dev/null 3<<'{key}'\n{command}\n{key}"


# Names begin with "_": a variable of the box must not be overwritten.
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
