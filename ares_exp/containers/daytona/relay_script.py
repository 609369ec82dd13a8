"""The `sh` source of the relay's side in a sandbox, where the service runs one command per request.

In a directory that only root may enter, each shell has a FIFO as its stdin, and a pump, which cuts its output into
numbered files. A request feeds the FIFO; a poll waits for the next files and returns them. A request repeated after a
lost answer has no second effect: feeds are numbered too, and a file stays until a later request confirms its arrival. A
pump stops while too many files wait, so that a flooding program blocks as on a pipe.

POSIX `sh`, `dd`, `mkfifo`, `base64`, `setsid` and `timeout` only (coreutils and util-linux, or busybox). Every script
is one command of less than 128 KiB that reads no stdin: the service's daemon gives it to a shell as an argument, or on
its stdin.
"""

from __future__ import annotations

import base64
import binascii
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ares_exp.containers.container import User

CHUNK_BYTES = 65_536
"""Bound on the bytes in one file of a pump: the capacity of a pipe."""

MAX_WAITING = 8
"""Bound on the waiting files of a pump."""

MAX_FED_BYTES = 60_000
"""Bound on the bytes that one script feeds: in base64 they have to stay below 128 KiB."""

MAX_CHUNKS_AT_ONCE = 12
"""Bound on the files in one answer, of all pumps together."""

MAX_ANSWER_BYTES = 2 * 1024 * 1024
"""Bound above the size of any answer of these scripts."""

LINGER_SEC = 0.004
"""Time that an answer waits for more behind its first file: usually the end of a short command."""

NO_DIRECTORY = 97
"""Exit code of a script whose directory was removed in the sandbox."""


_MARKS_KEPT = 16  # a request whose answer got lost may still arrive after the next ones
_NEEDED = ("mkfifo", "dd", "base64", "timeout", "setsid")


@dataclass(frozen=True, slots=True)
class Feed:
    """Bytes for a shell.

    Attributes:
        shell: Its number.
        number: Sequence number of this shell's feeds, from 0.
        data: At most `MAX_FED_BYTES`.
    """

    shell: int
    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class OutputPosition:
    """The position in a shell's output up to which it has arrived.

    Attributes:
        shell: Its number.
        pump: The pump's process number.
        next: The first file that has not arrived; earlier ones may be removed.
    """

    shell: int
    pump: int
    next: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One file of a pump; `data` is `None` at the end: the shell is gone, and all its output has arrived."""

    shell: int
    number: int
    data: bytes | None


def open_script(directory: str, key: str, shell: int, user: User | None) -> str:
    """Returns a script that starts a shell and its pump, once, and prints `KEY opened <pump, leader of both>`.

    Args:
        directory: The directory of FIFOs and files; created if missing. Must need no quoting.
        key: The mark of the script's output.
        shell: The new one's number.
        user: Who runs it; `None`: root.
    """
    pump = _PUMP.replace("SHELL", str(shell)).replace("BECOME", "exec sh" if user is None else become(user))
    return _one_command(
        f"_home=$PWD _umask=$(umask); umask 077; mkdir -p {directory} && cd {directory} || exit {NO_DIRECTORY}; "
        f"for _needed in {' '.join(_NEEDED)}; do command -v $_needed >/dev/null || "
        '{ echo "it has no program $_needed"; exit 1; }; done; '
        f"[ -p bell ] || mkfifo bell 2>/dev/null; exec 3<>bell; if mkfifo {shell}.in 2>/dev/null; then "
        # Data in a FIFO is lost when no process has it open: the pump opens it before the first feed.
        f"mkfifo {shell}.out {shell}.ack; exec 4<>{shell}.ack 5<>{shell}.in; "
        f'setsid sh -c {shlex.quote(pump)} pump "$_home" "$_umask" </dev/null >/dev/null 2>&1 & '
        f"echo $! >{shell}.new; mv {shell}.new {shell}.pid; fi; "
        f"_n=0; until [ -e {shell}.pid ] || [ $_n = 300 ]; do sleep 0.01; _n=$((_n + 1)); done; "
        f'read -r _pid <{shell}.pid; echo "{key} opened $_pid"'
    )


def feed_script(directory: str, feed: Feed) -> str:
    """Returns a script that feeds one shell, waiting until the FIFO has room."""
    return _one_command(f"cd {directory} 2>/dev/null || exit {NO_DIRECTORY}; {_feed(feed)}")


def poll_script(
    directory: str,
    key: str,
    generation: int,
    feeds: Sequence[Feed],
    positions: Sequence[OutputPosition],
    wait_sec: float,
) -> str:
    """Returns a script that feeds shells, then prints the new output of all, waiting for the first: see `chunks`.

    Args:
        directory: As in `open_script`.
        key: The mark of the script's output.
        generation: Higher than that of all polls before, which end if they still wait.
        feeds: Feeds of at most 4 KiB each, which a FIFO with room takes in one piece.
        positions: The positions of all open shells.
        wait_sec: Bound on the wait for output.
    """
    ready = " || ".join(f"[ -e {one.shell}.{one.next} ] || {_has_ended(one)}" for one in positions)
    ready = f"[ ! -e gen ] || {ready}"  # the directory was removed in the sandbox
    wait = (
        f"until {ready}; do read -r _ <&3; read -r _now <gen; "
        f'[ "$_now" = {generation} ] || {{ echo >&3; break; }}; done'
    )
    return _one_command(
        f"cd {directory} 2>/dev/null || exit {NO_DIRECTORY}; exec 3<>bell; "
        f"echo {generation} >gen.new; mv gen.new gen; echo >&3; "
        + "".join(f"{_feed(feed)}; " for feed in feeds)
        + "".join(_arrived(position) for position in positions)
        + f"{{ {ready}; }} || {{ timeout {wait_sec:g} sh -c {shlex.quote(wait)}; sleep {LINGER_SEC:g} 2>/dev/null; }}; "
        + "_count=0; "
        + "".join(_print(key, position) for position in positions)
    )


def close_script(directory: str, position: OutputPosition) -> str:
    """Returns a script that ends a shell and its pump, not its commands, and removes their files."""
    return _one_command(
        f"kill -9 -{position.pump} 2>/dev/null; cd {directory} 2>/dev/null || exit 0; rm -rf {position.shell}.*"
    )


def opened(key: str, answer: str) -> int:
    """Parses the process number printed by `open_script`.

    Raises:
        ValueError: It is missing.
    """
    for line in answer.splitlines():
        found = re.fullmatch(rf"{key} opened ([1-9][0-9]{{0,8}})", line)
        if found:
            return int(found[1])
    raise ValueError(f"Expected the number of a process, got {answer[-200:]!r}.")


def chunks(key: str, answer: str) -> list[Chunk]:
    """Parses the output of `poll_script`, in order for each shell.

    Raises:
        ValueError: It is forged: files are too large or not base64.
    """
    found: list[Chunk] = []
    for part in answer.split(f"{key} ")[1:]:
        head, _, text = part.partition("\n")
        shell, _, number = head.partition(" ")
        if not shell.isdecimal() or not (number.isdecimal() or number == "end"):
            raise ValueError(f"Expected the number of a shell and of a file, got {head[:80]!r}.")
        if number == "end":
            found.append(Chunk(int(shell), 0, None))
            continue
        try:
            data = base64.b64decode("".join(text.split()), validate=True)
        except binascii.Error as error:
            raise ValueError(f"Expected base64, got {text[:80]!r}.") from error
        if not 0 < len(data) <= CHUNK_BYTES:
            raise ValueError(f"Expected 1 to {CHUNK_BYTES} bytes, got {len(data)}.")
        found.append(Chunk(int(shell), int(number), data))
    return found


_PUMP = rf"""
{{ umask "$2"; cd -- "$1"; unset OLDPWD; BECOME; }} 0<>SHELL.in 1>SHELL.out 2>/dev/null 3>&- 4>&- 5>&- &
exec 0<SHELL.out
_n=0
while dd bs={CHUNK_BYTES} count=1 of=SHELL.part && [ -s SHELL.part ]; do
  mv -f SHELL.part SHELL.$_n
  _n=$((_n + 1))
  echo >&3
  while [ -e SHELL.$((_n - {MAX_WAITING})) ]; do read -r _ <&4; done
done
: >SHELL.end
echo >&3
"""


def become(user: User, program: str = "sh") -> str:
    """Returns source that replaces the shell by a program of a user.

    Args:
        user: A name, a number, or `uid:gid`, as engines take them.
        program: Words of a shell, without single quotes.
    """
    name, _, group = str(user).partition(":")
    source = _BECOME.replace("PROGRAM", program)
    return source.replace("USER", shlex.quote(name)).replace("GROUP", shlex.quote(group))


# busybox's `setpriv` cannot switch users; `su` takes no numbers.
_BECOME = r"""
_uid= _gid= _home=/ _name=
while IFS=: read -r _n _ _u _g _ _h _; do
  if [ "$_n" = USER ] || [ "$_u" = USER ]; then _name=$_n _uid=$_u _gid=$_g _home=$_h; break; fi
done </etc/passwd
case $_uid-USER in -*[!0-9]*|-) printf 'there is no user %s in the sandbox' USER; exit 1;; -*) _uid=USER _gid=0;; esac
_group=GROUP
export HOME="$_home"
if [ -n "$_group" ]; then set -- --regid="$_group" --clear-groups
elif [ -n "$_name" ]; then set -- --regid="$_gid" --init-groups
else set -- --regid="$_gid" --clear-groups; fi
setpriv --reuid="$_uid" "$@" true 2>/dev/null && exec setpriv --reuid="$_uid" "$@" PROGRAM
[ -n "$_name" ] && [ -z "$_group" ] && exec su -s /bin/sh "$_name" -c 'exec PROGRAM'
printf 'no program here can become user %s' USER
exit 1"""


def _one_command(script: str) -> str:
    """Returns the script as one command for any shell of the daemon: bash, zsh or sh.

    Feeds may be secret, so they are kept out of process arguments, which every user of the sandbox can read.
    """
    return f"exec sh <<'_ARES_EXP'\n{{ {script}\n}} </dev/null; exit\n_ARES_EXP\n"


def _feed(feed: Feed) -> str:
    text = base64.b64encode(feed.data).decode()
    mark = f"{feed.shell}.fed"
    return (
        f"if mkdir {mark}{feed.number} 2>/dev/null; then echo {text} | base64 -d 1<>{feed.shell}.in || exit 1; "
        f"rmdir {mark}{feed.number - _MARKS_KEPT} 2>/dev/null; fi; true"
    )


def _has_ended(position: OutputPosition) -> str:
    # A zombie has no `exe`.
    return f"[ -e {position.shell}.end ] || [ ! -e /proc/{position.pump}/exe ]"


def _arrived(position: OutputPosition) -> str:
    """Returns source that removes the files of the previous answer and lets the pump continue."""
    first = max(0, position.next - MAX_CHUNKS_AT_ONCE)
    files = " ".join(f"{position.shell}.{number}" for number in range(first, position.next))
    return f"rm -f {files}; echo 1<>{position.shell}.ack; " if files else ""


def _print(key: str, position: OutputPosition) -> str:
    shell = position.shell
    return (
        f"_ended=; {{ {_has_ended(position)}; }} && _ended=1; _n={position.next}; "
        f"while [ $_count -lt {MAX_CHUNKS_AT_ONCE} ] && [ -e {shell}.$_n ]; do "
        f'echo "{key} {shell} $_n"; base64 <{shell}.$_n || exit {NO_DIRECTORY}; '
        "_n=$((_n + 1)) _count=$((_count + 1)); done; "
        f'[ -z "$_ended" ] || [ -e {shell}.$_n ] || echo "{key} {shell} end"; '
    )
