"""Command execution in one container on persistent shells, because a new engine call per command would be slow.

A channel is a persistent shell (see `shell_channel`). If background processes of a command keep the channel's output
open, the channel does not run its next command until they close it. So the outputs of two commands never mix. To kill a
command after a timeout or a cancellation, a second channel runs a script that kills its processes.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import posixpath
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from ares_exp.cancellation import finish, happened
from ares_exp.containers.container import MAX_OUTPUT_BYTES, ROOT_NAMES, ExecResult, Shell, User
from ares_exp.containers.shell_channel import (
    BoundedOutput,
    Channel,
    ChannelStream,
    Script,
    ScriptRun,
    check_arguments,
    command_script,
    kill_script,
    sink_script,
)
from ares_exp.errors import ContainerDiedError, ContainerError

OPEN_TIMEOUT_SEC = 60.0
"""Time limit for opening a channel. A busy engine needs seconds. An engine that never responds must not block the run.
"""

MAX_IDLE = 16  # channels per user

MAX_OPENINGS = 8
"""Maximum number of channels per user that are opened at the same time for waiting commands."""

_STOPPED = "The container has been stopped and runs no more commands."

OpenStream = Callable[[User | None], Awaitable[ChannelStream]]
"""Function that starts a new POSIX `sh` in the container as this user (`None`: the default user).

The shell reads its source from stdin. It starts in the container's default directory. The function raises
`ContainerDiedError` with the reason if the container is gone, and another `ContainerError` if this user cannot get a
shell.
"""


class ShellPool:
    """The open channels of a container. Each channel belongs to a user, and is idle or lent to a running command."""

    def __init__(self, open_stream: OpenStream, try_again: Callable[[str], bool] = lambda why: False) -> None:
        """Creates an empty pool. `CommandRunner` describes the arguments."""
        self.is_closed = False
        self._open_stream = open_stream
        self._try_again = try_again
        self._channels: dict[User | None, set[Channel]] = collections.defaultdict(set)
        self._free: dict[User | None, collections.deque[Channel]] = collections.defaultdict(collections.deque)
        self._waiting: dict[User | None, collections.deque[asyncio.Future[Channel]]] = collections.defaultdict(
            collections.deque
        )
        self._openings: dict[User | None, set[asyncio.Task[None]]] = collections.defaultdict(set)

    async def fill(self) -> None:
        """Opens two channels for the default user: one to run a command, one to kill it."""
        opened = await asyncio.gather(self.open(None), self.open(None), return_exceptions=True)
        for one in opened:
            if isinstance(one, BaseException):
                raise one
            self._changed(one)

    async def take(self, user: User | None, *, urgent: bool = False) -> Channel:
        """Lends a ready channel to the caller: an idle channel, or the first channel that becomes ready.

        If a channel's command has just ended, `take` waits briefly until this channel is ready, because opening a new
        channel takes longer. An `urgent` caller gets a channel before other waiting callers.

        Raises:
            ContainerDiedError: The container has been stopped, is gone, or does not respond.
            ContainerError: This user cannot get a shell.
        """
        while True:
            if self.is_closed:
                raise ContainerDiedError(_STOPPED)
            if free := self._free[user]:
                return free.popleft()
            if coming := self._coming(user):
                await asyncio.wait(coming, timeout=max(coming.values()), return_when=asyncio.FIRST_COMPLETED)
            else:
                return await self._wait_for_one(user, urgent=urgent)

    async def _wait_for_one(self, user: User | None, *, urgent: bool) -> Channel:
        """Waits for the next channel that becomes free. Also opens new channels, at most one per waiting command."""
        waiting, openings = self._waiting[user], self._openings[user]
        channel: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        (waiting.appendleft if urgent else waiting.append)(channel)
        if len(openings) < min(MAX_OPENINGS, len(waiting)):
            openings.add(asyncio.create_task(self._open_one_or_more(user)))
        try:
            return await channel
        except asyncio.CancelledError:
            if channel.done() and not channel.cancelled() and channel.exception() is None:
                self._changed(channel.result())
            raise

    async def _open_one_or_more(self, user: User | None) -> None:
        """Opens a channel, and further channels one by one while commands wait.

        If this fails, the command that was first when the opening began gets the error. For a command that came later,
        another channel is opened: the previous command may have killed the first.
        """
        try:
            while True:
                first = self._next_waiting(user)
                try:
                    self._changed(await self.open(user))
                except Exception as error:
                    if first is not None and not first.done():
                        first.set_exception(error)
                if self._next_waiting(user) is None:
                    return
        finally:  # immediately: a waiter that got an error may wait again before the callbacks of this task run
            self._openings[user].discard(cast("asyncio.Task[None]", asyncio.current_task()))

    def _next_waiting(self, user: User | None) -> asyncio.Future[Channel] | None:
        """Returns the future of the first command that still waits for a channel, or `None`. Removes done futures."""
        waiting = self._waiting[user]
        while waiting and waiting[0].done():
            waiting.popleft()
        return waiting[0] if waiting else None

    async def open(self, user: User | None, *, again: bool = True) -> Channel:
        """Opens a new channel and lends it to the caller when it is ready. Raises the same errors as `take`.

        If the shell cannot start and `again` is true, the pool's function `try_again` decides from the error message
        whether to make a second attempt. There is no third attempt, because the agent may have replaced the shell with
        a program that always prints such a message.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_SEC):
                channel = Channel(await self._open_stream(user), user, self._changed)
                try:
                    await asyncio.wait({channel.ready})
                except BaseException:
                    channel.close()
                    raise
        except TimeoutError:
            raise ContainerDiedError(
                f"The container no longer responds: no shell could be opened within {OPEN_TIMEOUT_SEC:.0f} s."
            ) from None
        if self.is_closed:
            channel.close()
            raise ContainerDiedError(_STOPPED)
        channel.raise_if_lost()
        if channel.complaint and not channel.is_open:
            if again and self._try_again(channel.complaint):
                return await self.open(user, again=False)
            raise ContainerError(
                f"No shell could be opened in the container as {user or 'its default user'}: {channel.complaint}"
            )
        if not channel.is_open:
            raise ContainerError("The container cannot run commands: its shell ended immediately.")
        self._channels[user].add(channel)
        return channel

    def keep_spare(self, user: User | None) -> None:
        """Opens a spare channel in the background, unless a channel is free, will soon be free, or is being opened.

        The next command can then start before the first channel is ready again. A spare channel can also kill a command
        that uses up all process numbers, because a channel forks its next process in advance.
        """
        if not (self._free[user] or self._coming(user) or self._openings[user]):
            self._openings[user].add(asyncio.create_task(self._open_one_or_more(user)))

    def idle(self, user: User | None) -> tuple[Channel, ...]:
        """Returns this user's channels that are ready and that no caller uses."""
        return tuple(self._free[user])

    async def close(self) -> None:
        """Closes all channels, including lent ones. Idempotent."""
        self.is_closed = True
        opening = [task for tasks in self._openings.values() for task in tasks]
        for task in opening:
            task.cancel()
        for user in self._waiting:
            while (waiting := self._next_waiting(user)) is not None:
                waiting.set_exception(ContainerDiedError(_STOPPED))
        await asyncio.gather(*opening, return_exceptions=True)
        channels = [one for channels in self._channels.values() for one in channels]
        for channel in channels:
            channel.close()
        if channels:
            await asyncio.wait({channel.listener for channel in channels})

    def _coming(self, user: User | None) -> dict[asyncio.Future[None], float]:
        """Returns the `ready` futures of channels whose command has just ended, and the seconds to wait for each."""
        now = time.monotonic()
        answered = (one for one in self._channels[user] if one.settling_until > now and not one.ready.done())
        return {one.ready: one.settling_until - now for one in answered}

    def _changed(self, channel: Channel) -> None:
        """Passes a ready channel to the first waiting command, or keeps the channel idle. Removes a closed channel."""
        known, free = self._channels[channel.user], self._free[channel.user]
        if not channel.is_open:
            known.discard(channel)
            if channel in free:
                free.remove(channel)
        elif channel in known and (waiting := self._next_waiting(channel.user)) is not None and not self.is_closed:
            waiting.set_result(channel)
        elif channel in known and len(free) < MAX_IDLE and not self.is_closed:
            free.append(channel)
        elif channel in known:
            channel.close()


# A killed process tree usually ends within milliseconds. A loaded machine takes longer.
_KILL_SEC = 2.0

END_SEC = 8.0
"""Time limit for killing a command whose own time limit has expired."""

_logger = logging.getLogger(__name__)


class CommandKiller:
    """Kills the commands of one container.

    A kill script (`shell_channel.kill_script`) stops all processes that it finds. Two scripts at the same time could
    stop each other, so only one runs at a time, for all commands that are waiting to be killed.
    """

    def __init__(self, shells: ShellPool, root: User | None) -> None:
        """Creates the killer. `root` is a user who may kill all processes (`None`: the default user)."""
        self._shells = shells
        self._root = root
        self._doomed: dict[User | None, set[tuple[str, int]]] = collections.defaultdict(set)
        self._lock = asyncio.Lock()

    async def end(self, channel: Channel, run: ScriptRun, exec_id: str) -> None:
        """Kills a command's processes and waits for its remaining output. If that fails, closes `channel`."""
        if self._shells.is_closed:
            return
        root = run.pid or channel.shell.pid  # the shell has the script, and might still start it
        if not run.pid:
            channel.close()  # otherwise the kill could hit the channel's next command
        try:
            async with asyncio.timeout(END_SEC):
                for _ in range(2):  # at the first kill, the command's first process may not have its environment yet
                    await self.kill(channel.user, exec_id, root)
                    await asyncio.wait({channel.ready}, timeout=_KILL_SEC / 4)
                    if channel.run is not run or not channel.is_open:
                        return
        except TimeoutError:
            pass  # the engine does not respond; the next command reports it
        except ContainerError as error:
            if isinstance(error, ContainerDiedError):
                raise
            raise ContainerDiedError(f"The container is unusable: a command could not be killed. {error}") from error
        finally:
            if channel.run is run:
                channel.close()

    async def kill(self, user: User | None, exec_id: str, root: int) -> None:
        """Kills a command's processes with a script that also kills all other commands waiting to be killed."""
        waiting, own = self._doomed[user], (exec_id, root)
        waiting.add(own)
        try:
            async with self._lock:
                if own not in waiting:  # an earlier caller has also killed this command
                    return
                doomed = frozenset(waiting)
                exec_ids, pids = {one for one, _ in doomed}, {pid for _, pid in doomed if pid}
                word = await self._run_kill_script(user, exec_ids, pids)
                if word not in ("", "0") and user != self._root:  # root may own processes, for example after sudo
                    word = await self._run_kill_script(self._root, exec_ids, pids)
                if word:
                    waiting -= doomed
                if word != "0":
                    _logger.warning("Some processes of a killed command may still be running in the container.")
        finally:
            waiting.discard(own)

    async def _run_kill_script(self, user: User | None, exec_ids: set[str], pids: set[int]) -> str:
        """Runs the kill script. Returns its exit code, or an empty string if no shell responded."""
        for take in (functools.partial(self._shells.take, urgent=True), self._shells.open):
            channel = await take(user)
            run = channel.start(BoundedOutput(0))
            await channel.execute(run, lambda key, _: kill_script(exec_ids, pids, key=key), _KILL_SEC)
            if run.word:
                return run.word
            for one in (channel, *self._shells.idle(user)):  # a dead idle shell: the others are probably also dead
                one.close()
        return ""


# A ready channel starts within milliseconds. If it does not, a signal has probably stopped it.
_START_SEC = 10.0
# The output of an ended command usually arrives within milliseconds. A loaded machine takes longer.
_COLLECT_SEC = 8.0


class CommandRunner:
    """Runs the commands of one container on persistent shells. Any number of commands can run at the same time."""

    def __init__(
        self,
        open_stream: OpenStream,
        *,
        workdir: str | None = None,
        starts_there: bool = False,
        try_again: Callable[[str], bool] = lambda why: False,
        shell: Shell = "bash -c",
        default_user: User | None = None,
    ) -> None:
        """Creates a runner without opening a shell.

        Args:
            open_stream: Function that opens one shell.
            workdir: Default directory of commands, and base directory of a relative `cwd`. `None`: the directory in
                which the shells start.
            starts_there: Whether `open_stream` starts shells in `workdir`, even for a user who may not enter it.
                Container engines do this.
            try_again: Function that receives the error message of a shell that could not start, and returns whether to
                open it again.
            shell: Shell of commands that do not set another shell.
            default_user: User as whom `open_stream(None)` starts a shell; `None` means root. Commands that name this
                user run in the same shells.
        """
        self._workdir = workdir
        self._starts_there = starts_there
        self._shell: Shell = shell
        self._shells = ShellPool(open_stream, try_again)
        self._default_user = default_user
        self._killer = CommandKiller(self._shells, None if (default_user or "root") in ROOT_NAMES else "root")

    async def open(self) -> None:
        """Opens two shells for the default user. Raises `ContainerError` if that fails."""
        await self._shells.fill()

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
        """Runs a command as described in `Container.exec`. If the command kills its own shell, the exit code is 137."""
        check_arguments(command, cwd, env or {})
        if str(user) == self._default_user or {user, self._default_user} <= {"root", "0", 0}:
            user = None
        stays = cwd is None and self._starts_there
        if self._workdir is not None:
            cwd = posixpath.join(self._workdir, cwd) if cwd else self._workdir
        exec_id, started_at = secrets.token_hex(8), time.monotonic()
        output = BoundedOutput(max_output_bytes)
        errors = BoundedOutput(max_output_bytes) if separate_stderr else None
        sink = await self._open_sink(user, errors) if errors is not None else None
        script = functools.partial(
            command_script,
            command=command,
            exec_id=exec_id,
            cwd=cwd,
            stays=stays,
            env=env or {},
            shell=shell or self._shell,
            stderr=sink[1].sink.result() if sink is not None else None,
        )
        try:
            run, timed_out = await self._run(script, user, output, timeout_sec, exec_id)
        finally:
            if sink is not None:
                await finish(self._close_sink(*sink))
        return ExecResult(
            output=output.text(),
            stderr=errors.text() if errors is not None else None,
            exit_code=None if timed_out else int(run.word or 137),  # the command killed its own shell
            duration_sec=time.monotonic() - started_at,
            timed_out=timed_out,
            elided_bytes=output.elided_bytes + (errors.elided_bytes if errors is not None else 0),
        )

    async def close(self) -> None:
        """Closes every shell, but kills no commands. Their callers get `ContainerDiedError`. Idempotent."""
        await self._shells.close()

    async def _run(
        self, script: Script, user: User | None, output: BoundedOutput, timeout_sec: float | None, exec_id: str
    ) -> tuple[ScriptRun, bool]:
        """Runs a command until it exits or times out. Returns its `ScriptRun` and whether it timed out."""
        deadline = None if timeout_sec is None else asyncio.get_running_loop().time() + timeout_sec
        for _ in range(MAX_IDLE + 2):
            channel = await self._shells.take(user)
            run = channel.start(output)
            self._shells.keep_spare(user)
            try:
                await channel.execute(run, script, _until(deadline, at_most=_START_SEC))
                if run.pid and not run.answered.is_set():
                    await happened(run.answered, _until(deadline))
                timed_out = not run.answered.is_set() and _until(deadline) == 0
                if not run.answered.is_set() or (run.pid and not run.word):
                    await self._killer.end(channel, run, exec_id)
            except asyncio.CancelledError:
                await finish(self._killer.end(channel, run, exec_id))
                raise
            if self._shells.is_closed:
                raise ContainerDiedError("The container was stopped while a command ran in it.")
            if not (run.word or timed_out):
                channel.raise_if_lost()  # not retried: the command may have run
            if run.pid or timed_out:
                return run, timed_out
        raise ContainerDiedError("The container no longer responds: its shells end before they can run a command.")

    async def _open_sink(self, user: User | None, errors: BoundedOutput) -> tuple[Channel, ScriptRun]:
        """Runs a `sink_script` that receives a command's stderr. Returns the script's channel and its `ScriptRun`."""
        for take in (self._shells.take, self._shells.open):  # a shell may have died or been stopped while idle
            channel = await take(user)
            run = channel.start(errors)
            try:
                await channel.send(lambda key, _: sink_script(key=key))
                await asyncio.wait({run.sink}, timeout=_START_SEC)
            except BaseException:
                channel.close()
                raise
            if run.sink.done() and not run.sink.cancelled():
                return channel, run
            channel.close()
        raise ContainerDiedError("The container no longer responds: no shell for a command's stderr could be opened.")

    async def _close_sink(self, channel: Channel, run: ScriptRun) -> None:
        await channel.send(lambda key, _: f"end\n{key}\n")  # the sink reads the first line, then the server the second
        if not await happened(run.answered, _COLLECT_SEC):
            channel.close()


def _until(deadline: float | None, *, at_most: float | None = None) -> float | None:
    """Returns the seconds until `deadline`, at least 0 and at most `at_most`; `None` if both are `None`."""
    bounds = [] if at_most is None else [at_most]
    bounds += [] if deadline is None else [max(0.0, deadline - asyncio.get_running_loop().time())]
    return min(bounds, default=None)
