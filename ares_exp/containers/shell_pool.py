"""Commands of one container through persistent shells, so that no command costs an engine call.

A command borrows a free channel, or opens one. The channel is free again when nobody in the box holds the command's
output any more: a background process that a command leaves behind lives on, yet neither hangs it nor writes into the
output of the next one. Time limits and cancellation kill the command's processes through another channel.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import posixpath
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping

from ares_exp.containers.cancellation import finish
from ares_exp.containers.container import MAX_OUTPUT_BYTES, ExecResult, Shell, User
from ares_exp.containers.shell_channel import Channel, ChannelStream, ScriptRun
from ares_exp.containers.shell_output import BoundedOutput
from ares_exp.containers.shell_script import (
    BoxShell,
    check_arguments,
    command_script,
    end_of_sink,
    kill_script,
    sink_script,
)
from ares_exp.errors import ContainerDiedError, ContainerError

OPEN_TIMEOUT_SEC = 60.0
"""Bound on opening a channel: an engine under load takes seconds, one that hangs must not hang us."""

# A ready channel begins within milliseconds. One that has not by then was stopped by a signal, most likely.
_BEGIN_SEC = 10.0
# A killed tree is gone within milliseconds; the rest is for a loaded machine. First one try, then all together.
_KILL_SEC = 2.0
_END_SEC = 8.0
_MAX_IDLE = 16
_STOPPED = "The container has been stopped: it runs no more commands."

OpenStream = Callable[[User | None], Awaitable[ChannelStream]]
"""Opens a fresh POSIX `sh` (source from stdin) in the container as that user, `None` being the container's default.

Its working directory is the container's default one. It raises `ContainerDiedError` with the reason when the
container is gone, and another `ContainerError` when this user cannot have a shell.
"""

_logger = logging.getLogger(__name__)
_Script = Callable[[str, BoxShell], str]


class ShellPool:
    """Runs the commands of one container on persistent shells, as many at the same time as asked."""

    def __init__(
        self,
        open_stream: OpenStream,
        *,
        workdir: str | None = None,
        shell: Shell = "bash -lc",
        root: User | None = None,
    ) -> None:
        """Keeps what is needed to open shells; opens none yet.

        Args:
            open_stream: Opens one shell.
            workdir: Default directory of commands; `None` is where the shells start. Relative `cwd`s start there.
            shell: What reads commands that do not say.
            root: The user who may end everybody's processes; `None` when that is the default one.
        """
        self._root = root
        self._open_stream = open_stream
        self._workdir = workdir
        self._shell: Shell = shell
        self._channels: dict[User | None, set[Channel]] = collections.defaultdict(set)
        self._free: dict[User | None, collections.deque[Channel]] = collections.defaultdict(collections.deque)
        self._spares: dict[User | None, asyncio.Task[None]] = {}
        self._doomed: dict[User | None, set[tuple[str, int]]] = collections.defaultdict(set)
        self._kill_lock = asyncio.Lock()
        self._closed = False

    async def open(self) -> None:
        """Opens the default user's first two shells: one to run a command, one to end it.

        Raises:
            ContainerError: No shell can be had; `ContainerDiedError` when the container is gone.
        """
        opened = await asyncio.gather(self._open(None), self._open(None), return_exceptions=True)
        for one in opened:
            if isinstance(one, BaseException):
                raise one
            self._changed(one)

    async def exec(
        self,
        command: str,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        timeout_sec: float | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        shell: Shell | None = None,
        separate_stderr: bool = False,
    ) -> ExecResult:
        """As `Container.exec`. A command that kills the shell around it has exit code 137."""
        check_arguments(command, cwd, env or {})
        if self._workdir is not None:
            cwd = posixpath.join(self._workdir, cwd or "")
        exec_id, started_at = secrets.token_hex(8), time.monotonic()
        output, errors = BoundedOutput(max_output_bytes), BoundedOutput(max_output_bytes)
        sink = await self._open_sink(user, errors) if separate_stderr else None
        stderr = sink[1].sink.result() if sink is not None else None

        reader: Shell = shell or self._shell

        def script(key: str, box: BoxShell) -> str:
            return command_script(
                command,
                key=key,
                box=box,
                exec_id=exec_id,
                cwd=cwd,
                env=env or {},
                shell=reader,
                in_place=reader == self._shell != "bash -lc",
                stderr=stderr,
            )

        try:
            run, timed_out = await self._run(script, user, output, timeout_sec, exec_id)
        finally:
            if sink is not None:
                await finish(self._close_sink(*sink))
        return ExecResult(
            output=output.text(),
            stderr=errors.text() if separate_stderr else None,
            exit_code=None if timed_out else run.exit_code(),
            duration_sec=time.monotonic() - started_at,
            timed_out=timed_out,
            elided_bytes=output.elided_bytes + errors.elided_bytes,
        )

    async def close(self) -> None:
        """Closes every shell; commands under way raise `ContainerDiedError`. Idempotent. Kills no command by itself."""
        self._closed = True
        spares = list(self._spares.values())
        for task in spares:
            task.cancel()
        await asyncio.gather(*spares, return_exceptions=True)
        channels = [one for channels in self._channels.values() for one in channels]
        for channel in channels:
            channel.close()
        await asyncio.gather(*(channel.wait_closed() for channel in channels))

    async def _run(
        self, script: _Script, user: User | None, output: BoundedOutput, timeout_sec: float | None, exec_id: str
    ) -> tuple[ScriptRun, bool]:
        """Runs a command to its exit code or its time limit; returns it and whether the limit ended it."""
        deadline = None if timeout_sec is None else time.monotonic() + timeout_sec
        for _ in range(_MAX_IDLE + 2):
            channel = await self._take(user)
            run = channel.begin(output)
            if not self._free[user] and not self._coming(user):
                self._open_spare(user)
            try:
                await _play(channel, run, script, _until(deadline, at_most=_BEGIN_SEC))
                if run.begun and not run.answered.is_set():
                    await _answered(run, _until(deadline))
                timed_out = not run.answered.is_set() and _until(deadline) == 0
                if run.lost or not run.answered.is_set():
                    await self._end_command(channel, run, exec_id)
            except asyncio.CancelledError:
                await finish(self._end_command(channel, run, exec_id))
                raise
            if self._closed:
                raise ContainerDiedError("The container was stopped while a command ran in it.")
            if run.begun or timed_out:
                return run, timed_out
        raise ContainerDiedError("The container no longer answers: its shells end before they run a command.")

    async def _take(self, user: User | None) -> Channel:
        """A channel that is ready: a free one, one that will be free in a moment, or a new one."""
        while True:
            if self._closed:
                raise ContainerDiedError(_STOPPED)
            if free := self._free[user]:
                return free.popleft()
            if coming := self._coming(user):
                await asyncio.wait(coming, timeout=max(coming.values()), return_when=asyncio.FIRST_COMPLETED)
            else:
                return await self._open(user)

    def _coming(self, user: User | None) -> dict[asyncio.Future[None], float]:
        """What channels that have just answered will be ready by, and how many seconds that may take."""
        now = time.monotonic()
        return {one.ready: one.settling_until - now for one in self._channels[user] if one.settling_until > now}

    async def _open(self, user: User | None) -> Channel:
        """A new channel, ready and nobody else's."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_SEC):
                channel = Channel(await self._open_stream(user), user, self._shell, self._changed)
                try:
                    await asyncio.wait({channel.ready})
                except BaseException:
                    channel.close()
                    raise
        except TimeoutError:
            raise ContainerDiedError(
                f"The container no longer answers: no shell could be opened within {OPEN_TIMEOUT_SEC:.0f} s."
            ) from None
        if self._closed:
            channel.close()
            raise ContainerDiedError(_STOPPED)
        if channel.complaint and not channel.is_open:
            raise ContainerError(
                f"No shell could be opened in the container as {user or 'its default user'}: {channel.complaint}"
            )
        if not channel.is_open:
            raise ContainerError("The container runs no command: a shell that was opened in it ended at once.")
        self._channels[user].add(channel)
        return channel

    def _open_spare(self, user: User | None) -> None:
        """Opens one more channel in the background, at most once at a time.

        It takes turns with the first when commands follow each other quickly. And it can kill: a command that has left
        no process number for a new shell does not keep one from it, since its next process has been forked already.
        """

        async def open_spare() -> None:
            with contextlib.suppress(ContainerError):  # whoever needs a channel will learn why there is none
                self._changed(await self._open(user))

        if user not in self._spares or self._spares[user].done():
            self._spares[user] = asyncio.create_task(open_spare())

    def _changed(self, channel: Channel) -> None:
        """Puts a channel that is ready into the pool, and takes one that has closed out of it."""
        known, free = self._channels[channel.user], self._free[channel.user]
        if not channel.is_open:
            known.discard(channel)
            if channel in free:
                free.remove(channel)
        elif channel in known and len(free) < _MAX_IDLE and not self._closed:
            free.append(channel)
        elif channel in known:
            channel.close()

    async def _open_sink(self, user: User | None, errors: BoundedOutput) -> tuple[Channel, ScriptRun]:
        """A channel whose output is the stderr of a command in another one.

        Raises:
            ContainerDiedError: The container is gone.
        """
        for take in (self._take, self._open):  # the first may have died idle, or was stopped by a signal
            channel = await take(user)
            run = channel.begin(errors)
            try:
                await channel.send(lambda key, _: sink_script(key=key))
                await asyncio.wait({run.sink}, timeout=_BEGIN_SEC)
            except BaseException:
                channel.close()
                raise
            if run.sink.done() and not run.sink.cancelled():
                return channel, run
            channel.close()
        raise ContainerDiedError("The container no longer answers: no stream for stderr could be had.")

    async def _close_sink(self, channel: Channel, run: ScriptRun) -> None:
        """Collects what the command, which has ended, wrote to the sink."""
        await channel.send(lambda key, _: end_of_sink(key=key))
        if not await _answered(run, _END_SEC):
            channel.close()

    async def _end_command(self, channel: Channel, run: ScriptRun, exec_id: str) -> None:
        """Kills what a command started and collects what it had printed; closes the channel if that fails.

        Raises:
            ContainerDiedError: The container is gone.
        """
        if self._closed:
            return
        root = run.pid or channel.box.pid  # the latter has the script, and might still begin it
        if not run.begun:
            channel.close()  # else another command could be running in it by the time that it is killed
        try:
            async with asyncio.timeout(_END_SEC):
                for _ in range(2):  # the first may come before the command's first process has its environment
                    await self._kill(channel.user, exec_id, root)
                    await asyncio.wait({channel.ready}, timeout=_KILL_SEC / 4)
                    if channel.run is not run or not channel.is_open:
                        return
        except TimeoutError:
            pass  # the engine does not answer; the next command will tell
        except ContainerDiedError:
            raise
        except ContainerError as error:
            raise ContainerDiedError(f"The container is lost: a command in it could not be ended. {error}") from error
        finally:
            if channel.run is run:
                channel.close()

    async def _kill(self, user: User | None, exec_id: str, root: int) -> None:
        """Kills the processes of a command, together with those of all others that wait to be killed now."""
        waiting, own = self._doomed[user], (exec_id, root)
        waiting.add(own)
        try:
            async with self._kill_lock:
                if own not in waiting:  # somebody who came before has killed it as well
                    return
                doomed = frozenset(waiting)
                exec_ids, pids = {one for one, _ in doomed}, {pid for _, pid in doomed if pid}
                word = await self._run_kill_script(user, exec_ids, pids)
                if word not in ("", "0") and user != self._root:  # sudo has made some of them root's
                    word = await self._run_kill_script(self._root, exec_ids, pids)
                if word:
                    waiting -= doomed
                if word != "0":
                    _logger.warning("Some processes of a command that was to end may still run in the container.")
        finally:
            waiting.discard(own)

    async def _run_kill_script(self, user: User | None, exec_ids: set[str], pids: set[int]) -> str:
        """Its exit code; empty when no shell answered."""
        for take in (self._take, self._open):
            channel = await take(user)
            run = channel.begin(BoundedOutput(0))
            await _play(channel, run, lambda key, _: kill_script(exec_ids, pids, key=key), _KILL_SEC)
            if run.word:
                return run.word
            for one in (channel, *self._free[user]):  # it died idle, or was stopped by a signal: so were they
                one.close()
        return ""


async def _play(channel: Channel, run: ScriptRun, script: _Script, seconds: float | None) -> None:
    """Sends a script and waits for its exit code, so long at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await channel.send(script)
            await run.answered.wait()


async def _answered(run: ScriptRun, seconds: float | None) -> bool:
    """Waits for an exit code, so long at most; whether it is known then, or known never to come."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await run.answered.wait()
    return run.answered.is_set()


def _until(deadline: float | None, *, at_most: float | None = None) -> float | None:
    """Seconds until then, at least 0; `None` for no bound."""
    bounds = [] if at_most is None else [at_most]
    bounds += [] if deadline is None else [max(0.0, deadline - time.monotonic())]
    return min(bounds, default=None)
