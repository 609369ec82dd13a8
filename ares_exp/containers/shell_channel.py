"""Commands of one container through persistent shells, so that no command costs an engine call.

A *channel* is one `sh` in the box that reads source from a stream. A command borrows a free channel, or opens one, and
a *pump* task reads the channel until nobody in the box holds the command's output any more; only then is the channel
free again. So a background process that a command leaves behind lives on, yet neither hangs it nor writes into the
output of the next one. Time limits and cancellation kill the command's processes through another channel.
"""

from __future__ import annotations

import asyncio
import posixpath
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ares_exp.containers.cancellation import finish
from ares_exp.containers.container import MAX_OUTPUT_BYTES, ExecResult, User
from ares_exp.containers.shell_output import BoundedOutput, ScriptRun
from ares_exp.containers.shell_script import (
    BoxShells,
    check_arguments,
    framed_command,
    handshake,
    kill_trees,
    parse_handshake,
)
from ares_exp.errors import ContainerDiedError, ContainerError

OPEN_TIMEOUT_SEC = 60.0
"""Bound on opening a channel: an engine under load takes seconds, one that hangs must not hang us."""

# After the exit code, how long a command waits for its channel to come free. Longer: a background process holds it.
_SETTLE_SEC = 0.05
# A killed tree is gone within milliseconds; the rest is for a loaded machine. First one try, then all together.
_KILL_SEC = 2.0
_END_SEC = 8.0
_MAX_IDLE = 16
_STOPPED = "The container has been stopped: it runs no more commands."


class ChannelStream(Protocol):
    """Both ends of one running `sh`: what it reads as source text, what it prints.

    All methods are called from one event loop. Cancelling `read` loses no data.
    """

    async def read(self) -> bytes:
        """The next bytes of the shell's stdout; `b""` at its end. Its stderr is discarded, not mixed in.

        Raises:
            OSError: The connection broke; treated like the end.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Sends `data` to the shell's stdin; waits until it is on its way (flow control).

        Raises:
            OSError: The connection broke.
        """
        ...

    def close(self) -> None:
        """Releases the shell at once (kills it where nothing else ends it). Idempotent, never blocks or raises."""
        ...


OpenStream = Callable[[User | None], Awaitable[ChannelStream]]
"""Opens a fresh POSIX `sh` (source from stdin) in the container as that user, `None` being the container's default.

Its working directory is the container's default one. It raises `ContainerDiedError` with the reason when the
container is gone, and another `ContainerError` when this user cannot have a shell.
"""


class ShellChannels:
    """Runs the commands of one container on a pool of shells, as many at the same time as asked."""

    def __init__(self, open_stream: OpenStream, *, workdir: str | None = None, login_shell: bool = True) -> None:
        """Keeps what is needed to open shells; opens none yet.

        Args:
            open_stream: Opens one shell.
            workdir: Default directory of commands; `None` is where the shells start. Relative `cwd`s start there.
            login_shell: Whether commands run in `bash -lc` (reads the profile files) or in `bash -c` (faster).
        """
        self._open_stream = open_stream
        self._workdir = workdir
        self._login_shell = login_shell
        self._idle: dict[User | None, list[_Channel]] = {}
        self._pumps: set[asyncio.Task[None]] = set()
        self._doomed: dict[User | None, set[str]] = {}
        self._kill_lock = asyncio.Lock()
        self._closed = False

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        timeout_sec: float | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        login_shell: bool | None = None,
    ) -> ExecResult:
        """As `Container.exec`. A command that kills the shell around it has exit code 137."""
        check_arguments(command, cwd, env or {})
        if self._workdir is not None:
            cwd = posixpath.join(self._workdir, cwd or "")
        exec_id, started_at = secrets.token_hex(8), time.monotonic()
        login = self._login_shell if login_shell is None else login_shell

        def script(key: str, shells: BoxShells) -> str:
            return framed_command(command, key=key, exec_id=exec_id, shells=shells, cwd=cwd, env=env or {}, login=login)

        run, timed_out = await self._run(script, user, BoundedOutput(max_output_bytes), timeout_sec, exec_id)
        return ExecResult(
            output=run.output.text(),
            exit_code=None if timed_out else run.exit_code(),
            duration_sec=time.monotonic() - started_at,
            timed_out=timed_out,
            elided_bytes=run.output.elided_bytes,
        )

    async def close(self) -> None:
        """Closes every shell; commands under way raise `ContainerDiedError`. Idempotent. Kills no command by itself."""
        self._closed = True
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for channels in self._idle.values():
            for channel in channels:
                channel.stream.close()
        self._idle.clear()

    async def _run(
        self, script: _Script, user: User | None, output: BoundedOutput, timeout_sec: float | None, exec_id: str
    ) -> tuple[ScriptRun, bool]:
        """Runs a command to its exit code or its time limit; returns it and whether the limit ended it."""
        for _ in range(_MAX_IDLE + 2):
            run = self._start(await self._take(user), script, output)
            try:
                await asyncio.wait({run.answered}, timeout=timeout_sec)
                timed_out = not run.answered.done()
                if timed_out or run.lost:
                    await self._end_command(run, user, exec_id)
                else:
                    await asyncio.wait({run.pump}, timeout=_SETTLE_SEC)
            except asyncio.CancelledError:
                await finish(self._end_command(run, user, exec_id))
                raise
            if self._closed:
                raise ContainerDiedError("The container was stopped while a command ran in it.")
            if run.begun or timed_out:
                return run, timed_out
        raise ContainerDiedError("The container no longer answers: its shells end before they run a command.")

    async def _take(self, user: User | None) -> _Channel:
        """A free channel, or a new one."""
        if self._closed:
            raise ContainerDiedError(_STOPPED)
        idle = self._idle.get(user)
        return idle.pop() if idle else await self._open(user)

    async def _open(self, user: User | None) -> _Channel:
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_SEC):
                channel = _Channel(await self._open_stream(user), user)
                run = self._start(channel, lambda key, _: handshake(key), BoundedOutput(0), keep=False)
                try:
                    await asyncio.wait({run.pump})
                except BaseException:
                    run.pump.cancel()
                    channel.stream.close()
                    raise
        except TimeoutError:
            raise ContainerDiedError(
                f"The container no longer answers: no shell could be opened within {OPEN_TIMEOUT_SEC:.0f} s."
            ) from None
        if self._closed:
            channel.stream.close()
            raise ContainerDiedError(_STOPPED)
        if run.complaint:
            raise ContainerError(
                f"No shell could be opened in the container as {user or 'its default user'}: {run.complaint}"
            )
        if not run.ended:
            raise ContainerDiedError("The container no longer answers: a shell that was opened in it ended at once.")
        channel.shells = parse_handshake(run.word)
        return channel

    def _start(self, channel: _Channel, script: _Script, output: BoundedOutput, *, keep: bool = True) -> ScriptRun:
        """Feeds a script to a channel and starts the task that reads what comes back."""
        key = secrets.token_hex(8)
        text = script(key, channel.shells).encode("utf-8", "surrogateescape")
        run = ScriptRun(key, output)
        run.pump = asyncio.create_task(_pump(run, channel.stream, text))
        self._pumps.add(run.pump)
        # A callback, not a `finally` in the task: a task that is cancelled before its first step never enters it.
        run.pump.add_done_callback(lambda task: self._settle(task, run, channel, keep))
        return run

    def _settle(self, pump: asyncio.Task[None], run: ScriptRun, channel: _Channel, keep: bool) -> None:
        """Gives a channel back that is free again, and closes one that cannot be used again."""
        self._pumps.discard(pump)
        idle, free = self._idle.setdefault(channel.user, []), run.ended and not self._closed
        if free and keep and len(idle) < _MAX_IDLE:
            idle.append(channel)
        elif keep or not free:
            channel.stream.close()
        run.answer()

    async def _end_command(self, run: ScriptRun, user: User | None, exec_id: str) -> None:
        """Kills what a command started and collects what it had printed; closes the channel if that fails.

        Raises:
            ContainerDiedError: The container is gone.
        """
        if self._closed:
            return
        try:
            async with asyncio.timeout(_END_SEC):
                for _ in range(2):  # the first may come before the command's first process has its environment
                    await self._kill(exec_id, user)
                    await asyncio.wait({run.pump}, timeout=_KILL_SEC / 4)
                    if run.pump.done():
                        return
        except TimeoutError:
            pass  # the engine does not answer; the next command will tell
        finally:
            run.pump.cancel()

    async def _kill(self, exec_id: str, user: User | None) -> None:
        """Kills the processes of a command, together with those of all others that wait to be killed now."""
        doomed = self._doomed.setdefault(user, set())
        doomed.add(exec_id)
        async with self._kill_lock:
            exec_ids = frozenset(doomed)
            doomed.clear()
            if exec_id not in exec_ids:
                return
            for take in (self._take, self._open):  # a channel that sat idle may have died, or been stopped by a signal
                run = self._start(await take(user), lambda key, _: kill_trees(exec_ids, key=key), BoundedOutput(0))
                await asyncio.wait({run.pump}, timeout=_KILL_SEC)
                if run.pump.done() and run.word:
                    return
                run.pump.cancel()


async def _pump(run: ScriptRun, stream: ChannelStream, script: bytes) -> None:
    """Feeds a script to a shell and reads what comes back until nobody in the box holds its output any more."""
    try:
        await stream.write(script)
        while not run.ended and (data := await stream.read()):
            run.feed(data)
    except OSError:
        pass  # the same as the end of the stream


_Script = Callable[[str, BoxShells], str]
"""Makes a script for a key that only this script knows, and for what the channel's box offers."""


@dataclass(slots=True)
class _Channel:
    """One shell in the box."""

    stream: ChannelStream
    user: User | None
    shells: BoxShells = field(default_factory=BoxShells)
