"""Shells and terminals of a sandbox. The service provides a pseudo-terminal for each of them.

On each pseudo-terminal, the service starts a login shell, which this module replaces. A terminal gets a login shell of
the requested user. Commands get a shell between two pipes, with the environment variables that the service sets for
commands. The service disconnects clients that read too slowly. To prevent this, a script around the shell prints a mark
after each chunk of output, and pauses until our client has acknowledged earlier marks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import shlex
from collections import deque
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from ares_exp.cancellation import cancel_all, finish
from ares_exp.containers.container import User
from ares_exp.containers.daytona.service import DaytonaService
from ares_exp.containers.shell_channel import MarkParser, StreamLostError
from ares_exp.containers.terminal import FIND_SHELL
from ares_exp.errors import ContainerError, ContainerNotFoundError

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox

_START_SEC, _SET_UP_SEC = 30.0, 60
_END_SEC = 10.0
_MAX_BEFORE_BYTES = 64 * 1024  # bound on the output of the service's own shell
_MAX_QUEUED = 64  # pieces of unread output, after which the service waits
_MAX_INPUT_BYTES = 32 * 1024  # the service disconnects a client that sends 64 KiB at a time

# Every read of the terminal is a message of the service, which keeps 256 of them per client. The `kill` ends `cat`.
_SHELL = r"""
exec 2>/dev/null
export LC_ALL=C
cd DIRECTORY && stty raw -echo || exit
printf '\n%s\n' KEY
cat | env -i /bin/sh -c '. DIRECTORY/env
if [ -z "$1" ]; then exec sh; else exec sh DIRECTORY/become "$1" "$2" "exec sh"; fi' sh "$3" "$4" | {
n=0
while :; do
  case $(dd bs=4096 count=32 2>&1 >&3) in 0+0*) break;; esac
  if [ "$2" = told ]; then
    echo >"$1.$n"
    printf '\035KEY %d\035' $n >&3
    n=$((n + 1))
    while [ -e "$1.$((n - 2))" ]; do sleep 0.05 || sleep 1; done
  else
    sleep 0.05 || sleep 1
  fi
done
tries=100  # the service drops what it has not sent when the shell ends
while [ -e "$1.$((n - 1))" ] && [ $tries -gt 0 ]; do tries=$((tries - 1)); sleep 0.05 || sleep 1; done
rm -f "$1".*
kill $$
} 3>&1
"""

# busybox's `setpriv` cannot switch users, and `su` accepts no numbers.
_BECOME = r"""
_uid= _gid= _home=/ _name=
while IFS=: read -r _n _ _u _g _ _h _; do
  if [ "$_n" = "$1" ] || [ "$_u" = "$1" ]; then _name=$_n _uid=$_u _gid=$_g _home=$_h; break; fi
done </etc/passwd
case $_uid-$1 in -*[!0-9]*|-) printf 'there is no user %s in the sandbox' "$1"; exit 1;; -*) _uid=$1 _gid=0;; esac
_user=$1 _group=$2 _program=$3
export HOME="$_home"
if [ -n "$_group" ]; then set -- --regid="$_group" --clear-groups
elif [ -n "$_name" ]; then set -- --regid="$_gid" --init-groups
else set -- --regid="$_gid" --clear-groups; fi
setpriv --reuid="$_uid" "$@" true 2>/dev/null && exec setpriv --reuid="$_uid" "$@" sh -c "$_program"
[ -n "$_name" ] && [ -z "$_group" ] && exec su -s /bin/sh "$_name" -c "$_program"
printf 'no program here can become user %s' "$_user"
exit 1
"""

_SET_UP = r"""
for program in stty cat dd env sleep; do
  command -v $program >/dev/null 2>&1 || { echo "there is no $program in it"; exit 1; }
done
mask=$(umask); umask 077
rm -rf /tmp/.ares_exp-*; mkdir DIRECTORY || exit
export PWD
{ export -p; echo "umask $mask; cd -- \"\$PWD\"; unset OLDPWD"; } >DIRECTORY/env || exit
printf %s SHELL >DIRECTORY/shell; printf %s BECOME >DIRECTORY/become || exit
pwd
"""


class SandboxShells:
    """The shells and terminals of one sandbox.

    Attributes:
        service: Connection to the service.
        sandbox: The sandbox.
        directory: Directory in the sandbox that only root may enter. `open` creates it.
        is_ending: Whether the sandbox is about to be removed, so that its shells need not be ended one by one.
    """

    def __init__(self, service: DaytonaService, sandbox: AsyncSandbox) -> None:
        self.service = service
        self.sandbox = sandbox
        self._key = secrets.token_hex(8)
        self.directory = f"/tmp/.ares_exp-{secrets.token_hex(8)}"
        self.is_ending = False
        self._numbers = itertools.count()
        self._terminals: set[PseudoTerminal] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Writes scripts and the commands' environment variables to `directory`. Returns the commands' directory."""
        script = _SET_UP.replace("SHELL", shlex.quote(_SHELL.replace("KEY", self._key)))
        script = script.replace("BECOME", shlex.quote(_BECOME)).replace("DIRECTORY", self.directory)
        command = f"exec sh -c {shlex.quote(script)}"
        answer = await self.service.call(
            f"A command in sandbox {self.sandbox.name}",
            lambda _: self.sandbox.process.exec(command, timeout=_SET_UP_SEC),
            timeout_sec=2 * _SET_UP_SEC,
        )
        if answer.exit_code != 0:
            raise ContainerError(f"No shell could be started in the sandbox: {answer.result.strip()[-200:]!r}.")
        return str(answer.result).removesuffix("\n") or "/"

    async def open_shell(self, user: User | None, *, is_told: bool = True) -> ShellStream:
        """Starts a shell that runs commands.

        Args:
            user: User of the shell; `None`: root.
            is_told: Whether the shell pauses its output until this process has acknowledged earlier output. Use `False`
                if the protocol of the output has its own flow control: the shell then sends slowly, without
                acknowledgements.
        """
        number = next(self._numbers)
        name, _, group = str(user or "").partition(":")
        words = ["sh", f"{self.directory}/shell", str(number), "told" if is_told else "slowed", name, group]
        terminal = await self._start(f" exec {shlex.join(words)}\r", columns=80, lines=24)
        return ShellStream(self, terminal, number, MarkParser(self._key, b"\x1d") if is_told else None)

    async def open_terminal(
        self, *, columns: int, lines: int, user: User | None, workdir: str | None, env: Mapping[str, str]
    ) -> PseudoTerminal:
        """Opens a terminal and starts a login shell in it.

        Args:
            columns: Width of the terminal.
            lines: Height of the terminal.
            user: User of the shell; `None`: root.
            workdir: Directory in which the shell starts; `None`: the start directory of commands.
            env: Environment variables in addition to the variables of commands.
        """
        from daytona import FileUpload

        path = f"{self.directory}/terminal-{secrets.token_hex(6)}"
        name, _, group = str(user or "").partition(":")
        shell = f'printf "\\n%s\\n" {self._key}; {FIND_SHELL}; exec "$SHELL" -l'
        become = shlex.join(["exec", "sh", f"{self.directory}/become", name, group, shell])
        script = [  # a script, because typed text is echoed: variables and the mark must not appear
            'rm -f -- "$0"',
            f". {self.directory}/env",
            *(f"export {variable}={shlex.quote(value)}" for variable, value in env.items()),
            *([] if workdir is None else [f"cd -- {shlex.quote(workdir)} || cd /"]),
            *([] if user is None else [f'chown -- {shlex.quote(str(user))} "$(tty)" 2>/dev/null']),
            f"exec sh -c {shlex.quote(shell)}" if user is None else become,
        ]
        upload = FileUpload(source="\n".join(script).encode(), destination=path)
        await self.service.call(
            f"A terminal of sandbox {self.sandbox.name}", lambda _: self.sandbox.fs.upload_files([upload])
        )
        return await self._start(f" exec env -i /bin/sh {path}\r", columns=columns, lines=lines)

    async def has_heard(self, terminal: PseudoTerminal, mark: str) -> None:
        """Acknowledges output up to `mark`, so that the shell can send more. If that fails, hangs up the terminal."""
        path = f"{self.directory}/{mark}"
        try:
            with contextlib.suppress(ContainerNotFoundError):  # the response to an earlier attempt was lost
                await self.service.call(
                    f"The output of sandbox {self.sandbox.name}", lambda _: self.sandbox.fs.delete_file(path)
                )
        except ContainerError as error:
            await terminal.hang_up(str(error))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Closes the connections to all terminals. Their processes end later, with the sandbox. Idempotent."""
        await cancel_all(*self._tasks)
        await asyncio.gather(*(terminal.hang_up() for terminal in list(self._terminals)))

    async def _start(self, typed: str, *, columns: int, lines: int) -> PseudoTerminal:
        terminal = PseudoTerminal(self.service, self.sandbox)
        self._terminals.add(terminal)
        try:
            await terminal.start(typed, self._key, columns=columns, lines=lines)
        except BaseException:
            await terminal.close()
            raise
        finally:
            self._terminals = {one for one in self._terminals if one.is_open}
        return terminal


class PseudoTerminal:
    """A pseudo-terminal of the service, as a `Terminal`."""

    def __init__(self, service: DaytonaService, sandbox: AsyncSandbox) -> None:
        self._service = service
        self._sandbox = sandbox
        self._what = f"A terminal of sandbox {sandbox.name}"
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue(_MAX_QUEUED)
        self._handle: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._ahead = b""
        self._has_ended = False
        self._failure = ""
        self.is_open = True

    async def start(self, typed: str, mark: str, *, columns: int, lines: int) -> None:
        """Opens the terminal, types a command that replaces its shell, and waits until the new shell prints `mark`."""
        from daytona import PtySize

        async def request(_: AsyncDaytona) -> Any:
            # A session whose response was lost stays unused until the sandbox ends.
            name = f"ares-exp-{secrets.token_hex(6)}"
            size = PtySize(cols=columns, rows=lines)
            return await self._sandbox.process.create_pty_session(name, self._arrived.put, pty_size=size)

        self._handle = await self._service.call(self._what, request)
        self._watching = asyncio.create_task(self._watch(self._handle))
        printed = bytearray()
        line = re.compile(rb"[\r\n]%s\r*\n" % mark.encode())
        try:
            async with asyncio.timeout(_START_SEC):
                await self.write(typed.encode())
                while (found := line.search(printed)) is None:
                    data = await self.read()
                    if not data or len(printed) > _MAX_BEFORE_BYTES:
                        raise OSError("it ended" if not data else "it printed too much")
                    printed += data
        except OSError as error:  # includes TimeoutError
            shown = bytes(printed[-300:]).decode(errors="replace")
            raise ContainerError(
                f"{self._what} could not be opened: its shell did not start "
                f"({str(error) or f'within {_START_SEC:g} s'}). It printed: {shown!r}."
            ) from None
        self._ahead = bytes(printed[found.end() :])

    @property
    def lost(self) -> str:
        """Why the connection broke before the shell ended; empty if it did not break."""
        if self._failure or self._handle is None or self._handle.exit_code is not None:
            return self._failure
        return str(self._handle.error or "the service closed it")

    async def read(self) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        if self._has_ended or (not self.is_open and self._arrived.empty()):
            return b""
        data = await self._arrived.get()
        self._has_ended = not data
        return data

    async def write(self, data: bytes) -> None:
        from daytona import DaytonaError

        for start in range(0, len(data), _MAX_INPUT_BYTES):
            if self._handle is None:
                raise OSError("The terminal is closed.")
            try:
                await self._handle.send_input(data[start : start + _MAX_INPUT_BYTES])
            except DaytonaError as error:
                raise OSError(str(error)) from None

    async def close(self) -> None:
        await finish(self.end())

    async def end(self) -> None:
        """Ends the processes in the terminal immediately, and closes the connection."""
        handle = self._handle
        try:
            if handle is not None and handle.is_connected():
                with contextlib.suppress(ContainerError):  # it ends with the sandbox
                    await self._service.call(
                        self._what,
                        lambda _: self._sandbox.process.kill_pty_session(str(handle.session_id)),
                        timeout_sec=_END_SEC,
                    )
        finally:
            await self.hang_up()

    async def hang_up(self, why: str = "") -> None:
        """Closes only the connection. The processes in the terminal end later, with the sandbox. Idempotent."""
        self.is_open = False
        self._failure = self._failure or why
        handle, self._handle = self._handle, None
        if self._arrived.empty():
            self._arrived.put_nowait(b"")
        if handle is not None:
            await handle.disconnect()
        if self._watching is not None:
            await cancel_all(self._watching)

    async def _watch(self, handle: Any) -> None:
        await handle.wait()
        await self._arrived.put(b"")


class ShellStream:
    """The stdin and stdout of a shell in a sandbox, as a `ChannelStream`."""

    def __init__(self, shells: SandboxShells, terminal: PseudoTerminal, number: int, marks: MarkParser | None) -> None:
        """Takes over the terminal of a running shell. `marks` parses the marks to acknowledge (`None`: no marks)."""
        self._shells = shells
        self._terminal = terminal
        self._number = number
        self._marks = marks
        self._ready: deque[bytes] = deque()
        self._is_closed = False

    async def read(self) -> bytes:
        while not self._ready:
            data = await self._terminal.read()
            if not data:
                if self._terminal.lost:
                    raise StreamLostError(self._terminal.lost)
                return b""
            if self._marks is None:
                return data
            try:
                for output, mark in self._marks.feed(data):
                    if output:
                        self._ready.append(output)
                    if mark is not None:
                        heard = f"{self._number}.{int(mark)}"
                        self._shells.in_background(self._shells.has_heard(self._terminal, heard))
            except ValueError as error:
                raise OSError(f"A program in the sandbox printed an invalid control sequence: {error}") from error
        return self._ready.popleft()

    async def write(self, data: bytes) -> None:
        await self._terminal.write(data)

    def close(self) -> None:
        if not (self._is_closed or self._shells.is_ending):
            self._is_closed = True
            self._shells.in_background(self._terminal.end())
