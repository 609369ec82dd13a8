"""The processes of one local container: bubblewrap, the container's first process, and the shells that it starts.

The first process is a bash that reads requests for new shells from a pipe. Only the run's process can write to the
pipe. When the run's process closes it or dies, the bash ends, and the kernel kills all processes of the container. As
PID 1, the bash cannot be killed from inside, and it reaps orphaned processes. Without a PID namespace, a `guardian`
starts the bash, kills all processes at the end, and reaps orphans.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ares_exp.cancellation import cancel_all, finish, happened
from ares_exp.containers.container import ROOT_NAMES, User
from ares_exp.containers.local import guardian
from ares_exp.containers.local.cgroup import RECORD, Reserve, lack_of_memory
from ares_exp.containers.local.container_files import SEARCH_PATH
from ares_exp.containers.local.fifo_stream import FifoStream, fifo_pair
from ares_exp.containers.local.isolation import CHANNELS, compiled_filter
from ares_exp.containers.network_namespace import listen_in_namespace
from ares_exp.containers.ownership import read_if_readable
from ares_exp.containers.terminal import FIND_SHELL, TERM, Terminal
from ares_exp.errors import ContainerDiedError, ContainerError, ContainerStartError

SHELL_TIMEOUT_SEC = 20.0

_INFO = "namespaces"
_GRACE_SEC = 1.0
_REPORT_SEC = 0.2
_RESERVE_SEC = 0.5
_KILL_SEC = 5.0
_REAP_SEC, _LOOK_EVERY_SEC = 5.0, 0.01
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?")

# Arguments: the container's directory, then bubblewrap and its arguments. First enters the container's cgroups.
_LAUNCH = """
while IFS= read -r group; do echo 0 >"$group/cgroup.procs" || exit; done <"$1/RECORD"
shift
exec "$@"
""".replace("RECORD", RECORD)

# Words of a request: name of the FIFOs, "clean" or "full" environment, user ("-" for root).
_SERVE = r"""
path=$PATH PATH=SEARCH_PATH
hash setpriv env 2>/dev/null
setpriv=${BASH_CMDS[setpriv]} env=${BASH_CMDS[env]} PATH=$path
become() {
  name=${1%%:*} group=${1#"$name"} group=${group#:} groups=--clear-groups
  IFS=: read -r _ _ uid gid _ home _ < <(PATH=SEARCH_PATH getent passwd "$name")
  if [ -n "$uid" ] && [ -z "$group" ]; then groups=--init-groups
  elif [ -z "$uid" ]; then
    case $name in *[!0-9]*) echo "the container has no user '$name'"; exit ;; esac
    uid=$name gid=0 home=/
  fi
  case $group in
  '') ;;
  *[!0-9]*)
    IFS=: read -r _ _ gid _ < <(PATH=SEARCH_PATH getent group "$group")
    [ -n "$gid" ] || { echo "the container has no group '$group'"; exit; } ;;
  *) gid=$group ;;
  esac
  [ -n "$setpriv" ] || { echo "the host has no setpriv (package util-linux)"; exit; }
  [ "$HOME" != /root ] || HOME=$home
  become=("$setpriv" --reuid "$uid" --regid "$gid" "$groups" --inh-caps=-all)
}
attach() {
  trap - EXIT INT QUIT  # from version 5.3 on, bash keeps both signals ignored in background commands
  exec <"CHANNELS/$1.in" >"CHANNELS/$1.out" 2>/dev/null || exit
  echo 500 >/proc/self/oom_score_adj  # the OOM killer takes commands first and the container last
  become=()
  [ "$3" = - ] || become "$3"
  echo ok
  if [ "$2" = clean ]; then exec "$env" -i HOME="$HOME" ${MARK:+MARK="$MARK"} "${become[@]}" /bin/sh; fi
  exec "${become[@]}" /bin/sh
}
echo ready
exec >/dev/null 2>&1
trap 'exec /bin/bash CHANNELS/serve' EXIT  # a bash that cannot fork gives up
kill -s CHLD $$  # reaps processes that ended during this exec; a fork might fail
while read -r id environment user; do attach "$id" "$environment" "$user" & done
trap - EXIT
""".replace("SEARCH_PATH", SEARCH_PATH).replace("MARK", guardian.MARK)


@dataclass(frozen=True, slots=True)
class Launch:
    """The parameters with which a container's first process is started.

    Attributes:
        directory: The container's directory on this machine. It contains `channels/` and the list of the container's
            cgroups.
        bwrap: Path of bubblewrap; `None` if the process runs directly on this machine.
        arguments: Arguments of bubblewrap, from `isolation.bwrap_arguments`.
        is_guarded: Whether the container has no PID namespace, so that a guardian ends its processes.
        env: Environment variables of the process. Used only without bubblewrap.
        held: File descriptor of a lock, which the guardian keeps open until it ends. Used only without bubblewrap.
        files_in_memory: Whether the container's files are in memory and count towards its memory limit.
    """

    directory: Path
    bwrap: Path | None = None
    arguments: Sequence[str] = ()
    is_guarded: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    held: int | None = None
    files_in_memory: bool = False

    @property
    def channels(self) -> str:
        """Path of the directory with the FIFOs, as the container sees it."""
        return CHANNELS if self.bwrap is not None else str(self.directory / "channels")

    def command(self, options: Sequence[str]) -> list[str | Path]:
        words: list[str | Path] = ["/bin/bash", f"{self.channels}/serve"]
        if self.bwrap is not None:
            first = () if self.is_guarded else ("--as-pid-1",)
            words = ["/bin/sh", "-c", _LAUNCH, "sh", self.directory, self.bwrap, *options, *first, "--", *words]
        if self.is_guarded:
            held = "" if self.held is None else str(self.held)
            words = [sys.executable, "-I", "-S", guardian.__file__, self.directory, held, *words]
        return words


class ContainerProcess:
    """The first process of a container, and the shells that it starts. `launch` starts the process, `kill` ends it."""

    def __init__(self, process: subprocess.Popen[bytes], control: FifoStream, how: Launch) -> None:
        self._process = process
        self._control = control
        self._how = how
        self._reserve = Reserve(how.directory)
        self._count = 0
        self._streams: list[FifoStream] = []
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @classmethod
    async def launch(cls, how: Launch) -> ContainerProcess:
        """Starts the first process and waits until it responds. The caller sets the timeout.

        Raises `ContainerStartError` with the error output if the process does not start.
        """
        started = cls._spawn(how)
        try:
            if await started._control.read_line() != "ready\n":
                await asyncio.wait_for(started._exited.wait(), _KILL_SEC)
                what = "bubblewrap sandbox" if how.bwrap is not None else "first process"
                raise ContainerStartError(f"The {what} did not start: {started.why_ended()}.")
        except BaseException:
            await finish(started.kill())
            raise
        return started

    @classmethod
    def _spawn(cls, how: Launch) -> ContainerProcess:
        directory = how.directory
        (directory / "channels" / "serve").write_text(_SERVE.replace("CHANNELS", how.channels))
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            options: list[str] = []
            passed = [how.held] if how.held is not None else []
            if how.bwrap is not None:
                # In memory, not on the command line, which every user of the host may read.
                words = _in_memory(b"".join(os.fsencode(word) + b"\0" for word in how.arguments), theirs)
                filters = [_in_memory(code, theirs) for code in (compiled_filter(),) if code is not None]
                info = theirs.enter_context((directory / _INFO).open("wb")).fileno()
                options += ["--args", str(words), "--info-fd", str(info)]
                options += [word for fd in filters for word in ("--seccomp", str(fd))]
                passed += [words, info, *filters]
            requests, requests_in = _pipe(reader=theirs, writer=ours)
            answers, answers_in = _pipe(reader=ours, writer=theirs)
            for descriptor in (requests_in, answers):
                os.set_blocking(descriptor, False)
            env = {"PATH": SEARCH_PATH} if how.bwrap is not None else dict(how.env)
            process = subprocess.Popen(
                how.command(options),
                stdin=requests,
                stdout=answers_in,
                stderr=theirs.enter_context((directory / "errors").open("wb")),
                pass_fds=passed,
                # Inside, /proc/1/environ shows the environment of bwrap.
                env=env | ({guardian.MARK: directory.name} if how.is_guarded else {}),
                cwd="/",
                start_new_session=True,
            )
            ours.callback(process.wait)
            ours.callback(process.kill)
            started = cls(process, FifoStream(reader=answers, writer=requests_in), how)
            ours.pop_all()  # now owned by the process object
            return started

    @property
    def is_running(self) -> bool:
        return not self._exited.is_set()

    def listen(self, address: tuple[str, int]) -> socket.socket:
        """Opens a listening socket at `address` inside the container's network. Blocking."""
        about = self._namespaces()
        return listen_in_namespace(about["child-pid"], about["net-namespace"], address)

    def _namespaces(self) -> dict[str, int]:
        about: dict[str, int] = json.loads((self._how.directory / _INFO).read_text())
        return about

    async def open_terminal(
        self, user: User, *, columns: int, lines: int, env: Mapping[str, str], workdir: str
    ) -> Terminal:
        """Starts a login shell on a terminal in the container. Raises the same errors as `open_shell`."""
        try:
            pid = os.getpid() if self._how.bwrap is None else self._namespaces()["child-pid"]
            terminal, path = _open_pseudo_terminal(pid, columns=columns, lines=lines)
        except OSError as error:
            raise ContainerError(f"No terminal could be created for the local container: {error}.") from error
        self._streams.append(terminal)
        # The outer shell keeps the stream open until the inner one ends. Jobs of the inner one may keep the terminal
        # open.
        inside = f'exec 3>&1 <>{path} >&0 2>&0; echo >&3; cd {shlex.quote(workdir)}; {FIND_SHELL}; "$SHELL" -l 3>&-'
        variables = " ".join(shlex.quote(f"{name}={value}") for name, value in {**env, "TERM": TERM}.items())
        with contextlib.ExitStack() as opened:
            opened.callback(terminal.close)
            try:
                if str(user) not in ROOT_NAMES:
                    owner = await self.open_shell("root")
                    await owner.write(f"chown {shlex.quote(str(user))} {path}; echo\n".encode())
                    await owner.read_line()
                    owner.close()
                shell = await self.open_shell(user)
                opened.callback(shell.close)
                await shell.write(f"exec env {variables} setsid /bin/sh -c {shlex.quote(inside)}\n".encode())
                async with asyncio.timeout(SHELL_TIMEOUT_SEC):
                    if not await shell.read_line():
                        raise OSError("its shell does not start")
            except OSError as error:
                raise ContainerDiedError(f"The local container cannot open a terminal: {error}.") from error
            opened.pop_all()
        return _LocalTerminal(terminal, shell)

    async def open_shell(self, user: User, *, clean_env: bool = False) -> FifoStream:
        """Starts a `/bin/sh` in the container. Returns its stdin (for source text) and stdout as one stream.

        `clean_env` removes environment variables except `HOME`. Raises `ContainerError` if the container has no such
        user, and `ContainerDiedError` if it does not respond.
        """
        name = str(user)
        if not _USER.fullmatch(name):
            raise ContainerError(f"Expected a user as a name, a uid or 'uid:gid', got {name!r}.")
        self._count += 1
        request = f"{self._count} {'clean' if clean_env else 'full'} {'-' if name in ROOT_NAMES else name}\n"
        self._reserve.open()
        try:
            with fifo_pair(self._how.directory / "channels", str(self._count)) as stream:
                answer = await self._ask(request, stream)
                if answer != "ok\n":
                    raise ContainerError(
                        f"No shell could be started for the user {name!r}: {answer.strip() or 'it ended immediately'}."
                    )
                self._streams = [one for one in self._streams if not one.is_closed] + [stream]
                return stream
        except OSError as error:
            raise ContainerDiedError(f"The local container cannot run more commands: {error}.") from error
        finally:
            self._loop.call_later(_RESERVE_SEC, self._reserve.close)  # the new shell still has to start processes

    async def _ask(self, request: str, stream: FifoStream) -> str:
        await self._control.write(request.encode())
        line, end = asyncio.ensure_future(stream.read_line()), asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait({line, end}, timeout=SHELL_TIMEOUT_SEC, return_when=asyncio.FIRST_COMPLETED)
            if line.done():
                return line.result()
        finally:
            line.cancel()
            end.cancel()
        reason = self.why_ended() if end.done() else f"no shell started within {SHELL_TIMEOUT_SEC:.0f} s"
        raise ContainerDiedError(f"The local container no longer responds: {reason}.")

    async def reaped(self) -> None:
        """Waits after a kill until the container is no longer near its process limit, but at most `_REAP_SEC`.

        Killed processes count until they are reaped, and bash does not always retry a fork that fails at the limit.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_SEC):
                while self._reserve.is_needed:  # noqa: ASYNC110 (the kernel reaps)
                    await asyncio.sleep(_LOOK_EVERY_SEC)

    async def kill(self) -> None:
        """Ends the container, waits some milliseconds for its processes to end, and closes all streams. Idempotent."""
        grace = _GRACE_SEC + (guardian.KILL_SEC if self._how.is_guarded else 0.0)
        self._control.close()
        if self.is_running:
            self._process.send_signal(signal.SIGCONT)  # the container may have stopped a guardian
        try:
            await happened(self._exited, grace)
        finally:
            for stream in self._streams:
                stream.close()
            if self.is_running:
                self._process.kill()  # bubblewrap's sandbox dies with it
        await happened(self._exited, _KILL_SEC)

    def _reap(self) -> None:
        if self._process.poll() is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._exited.set()

    async def has_ended(self) -> bool:
        """Returns whether the process has ended. Waits briefly for the kernel to report the end."""
        return await happened(self._exited, _REPORT_SEC)

    def why_ended(self) -> str:
        """Returns why the process ended by itself, for an error message."""
        status = self._process.returncode or 0
        killer = status - 128 if status > 128 else -status  # of the container's first process, or of bubblewrap
        if killer == signal.SIGKILL and (
            lack := lack_of_memory(self._how.directory, holds_files=self._how.files_in_memory)
        ):
            return lack
        if text := read_if_readable(self._how.directory / "errors")[-2000:].strip().rstrip("."):
            return text
        if 0 < killer <= signal.SIGRTMAX:
            return f"it was killed by signal {killer}"
        return f"it ended with status {status}"


def _pipe(*, reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    reader.callback(os.close, ends[0])
    writer.callback(os.close, ends[1])
    return ends


def _in_memory(content: bytes, opened: contextlib.ExitStack) -> int:
    descriptor = os.memfd_create("ares_exp")
    opened.callback(os.close, descriptor)
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


_TIOCSPTLCK, _TIOCGPTN = 0x40045431, 0x80045430
_LAST_WORDS_SEC = 0.05
_PTMX = os.makedev(5, 2)


def _open_pseudo_terminal(pid: int, *, columns: int, lines: int) -> tuple[FifoStream, str]:
    """Opens a pseudo-terminal. Returns a stream to our end, and the path of the other end in the container.

    The container cannot replace its `/dev` and `/dev/pts`, so the opened file is certainly one of its pseudo-terminals.
    """
    reader = os.open(
        Path("/proc", str(pid), "root/dev/pts/ptmx"),
        os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC,
    )
    try:
        found = os.fstat(reader)
        if not stat.S_ISCHR(found.st_mode) or found.st_rdev != _PTMX:
            raise OSError("/dev/pts/ptmx of the container is not a pseudo-terminal")
        fcntl.ioctl(reader, _TIOCSPTLCK, struct.pack("i", 0))
        (number,) = struct.unpack("i", fcntl.ioctl(reader, _TIOCGPTN, struct.pack("i", 0)))
        termios.tcsetwinsize(reader, (lines, columns))
        return FifoStream(reader=reader, writer=os.dup(reader)), f"/dev/pts/{number}"
    except BaseException:
        os.close(reader)
        raise


class _LocalTerminal:
    """A `Terminal` of a local container. It ends when its shell ends, even if background processes still run."""

    def __init__(self, stream: FifoStream, shell: FifoStream) -> None:
        self._stream = stream
        self._shell = shell
        self._watching = asyncio.create_task(self._watch())

    async def read(self) -> bytes:
        return await self._stream.read()

    async def write(self, data: bytes) -> None:
        await self._stream.write(data)

    async def close(self) -> None:
        await cancel_all(self._watching)

    async def _watch(self) -> None:
        try:
            with contextlib.suppress(OSError):
                while await self._shell.read():
                    pass
                await asyncio.sleep(_LAST_WORDS_SEC)
        finally:
            self._shell.close()
            self._stream.close()
