"""Commands of one container on persistent shells, so that a command costs no engine call.

A command borrows a free channel, or opens one. The channel is free again when no process in the container holds the
command's output: a background process that a command leaves behind neither blocks it nor writes into the output of the
next one. Time limits and cancellation kill the command's processes through another channel. Commands that end at about
the same time share one kill script (`shell_channel.kill_script`): otherwise the killers of many commands cancelled
together would stop each other.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import logging
import posixpath
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial

from ares_exp.cancellation import finish, happened
from ares_exp.containers.container import MAX_OUTPUT_BYTES, ExecResult, Shell, User
from ares_exp.containers.shell_channel import (
    BoundedOutput,
    Channel,
    Script,
    ScriptRun,
    check_arguments,
    command_script,
    kill_script,
    sink_script,
)
from ares_exp.containers.shell_pool import MAX_IDLE, OpenStream, ShellPool
from ares_exp.errors import ContainerDiedError, ContainerError

# A killed tree is gone within milliseconds; the rest is for a loaded machine. First one try, then all together.
_KILL_SEC = 2.0

END_SEC = 8.0
"""Bound on killing a command after its time limit."""

_logger = logging.getLogger(__name__)


class CommandKiller:
    """Kills the commands of one container."""

    def __init__(self, shells: ShellPool, root: User | None) -> None:
        """Args: root: The user who may kill all processes; `None` when that is the default user."""
        self._shells = shells
        self._root = root
        self._doomed: dict[User | None, set[tuple[str, int]]] = collections.defaultdict(set)
        self._lock = asyncio.Lock()

    async def end(self, channel: Channel, run: ScriptRun, exec_id: str) -> None:
        """Kills the processes of a command and collects its output; closes the channel if that fails."""
        if self._shells.is_closed:
            return
        root = run.pid or channel.shell.pid  # the latter has the script, and might still start it
        if not run.pid:
            channel.close()  # else the kill could hit the channel's next command
        try:
            async with asyncio.timeout(END_SEC):
                for _ in range(2):  # the first may precede the environment of the command's first process
                    await self.kill(channel.user, exec_id, root)
                    await asyncio.wait({channel.ready}, timeout=_KILL_SEC / 4)
                    if channel.run is not run or not channel.is_open:
                        return
        except TimeoutError:
            pass  # the engine does not answer; the next command reports it
        except ContainerError as error:
            if isinstance(error, ContainerDiedError):
                raise
            raise ContainerDiedError(f"The container is lost: a command in it could not be killed. {error}") from error
        finally:
            if channel.run is run:
                channel.close()

    async def kill(self, user: User | None, exec_id: str, root: int) -> None:
        """Kills the processes of a command, together with those of all other commands waiting to be killed."""
        waiting, own = self._doomed[user], (exec_id, root)
        waiting.add(own)
        try:
            async with self._lock:
                if own not in waiting:  # an earlier caller has killed it as well
                    return
                doomed = frozenset(waiting)
                exec_ids, pids = {one for one, _ in doomed}, {pid for _, pid in doomed if pid}
                word = await self._run_kill_script(user, exec_ids, pids)
                if word not in ("", "0") and user != self._root:  # sudo has made some of them root's
                    word = await self._run_kill_script(self._root, exec_ids, pids)
                if word:
                    waiting -= doomed
                if word != "0":
                    _logger.warning("Some processes of a killed command may still run in the container.")
        finally:
            waiting.discard(own)

    async def _run_kill_script(self, user: User | None, exec_ids: set[str], pids: set[int]) -> str:
        """Returns the script's exit code; empty when no shell answered."""
        for take in (partial(self._shells.take, urgent=True), self._shells.open):
            channel = await take(user)
            run = channel.start(BoundedOutput(0))
            await channel.play(run, lambda key, _: kill_script(exec_ids, pids, key=key), _KILL_SEC)
            if run.word:
                return run.word
            for one in (channel, *self._shells.idle(user)):  # it died while idle: so did the others, probably
                one.close()
        return ""


# A ready channel starts within milliseconds. One that has not started by then was probably stopped by a signal.
_START_SEC = 10.0
# The output of an ended command arrives within milliseconds; the rest is for a loaded machine.
_COLLECT_SEC = 8.0


class CommandRunner:
    """Runs the commands of one container on persistent shells, any number at a time."""

    def __init__(
        self,
        open_stream: OpenStream,
        *,
        workdir: str | None = None,
        starts_there: bool = False,
        try_again: Callable[[str], bool] = lambda why: False,
        shell: Shell = "bash -c",
        root: User | None = None,
    ) -> None:
        """Opens no shell yet.

        Args:
            open_stream: Opens one shell.
            workdir: Default directory of commands; `None` is where the shells start. Relative `cwd`s start there.
            starts_there: Whether the backend opens shells in `workdir`, also for a user who cannot enter it, as
                container engines do.
            try_again: Called with the reason why a stream was no shell; returns whether to open another one.
            shell: The default shell of commands.
            root: The user who may kill all processes; `None` when that is the default user.
        """
        self._workdir = workdir
        self._starts_there = starts_there
        self._shell: Shell = shell
        self._shells = ShellPool(open_stream, try_again)
        self._killer = CommandKiller(self._shells, root)

    async def open(self) -> None:
        """Opens the default user's first two shells: one to run a command, one to kill it.

        Raises:
            ContainerError: No shell can be opened; `ContainerDiedError` when the container is gone.
        """
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
        """Runs a command as `Container.exec` does. The exit code of one that kills its own shell is 137."""
        check_arguments(command, cwd, env or {})
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
            exit_code=None if timed_out else int(run.word or 137),  # the command killed the shell that reports
            duration_sec=time.monotonic() - started_at,
            timed_out=timed_out,
            elided_bytes=output.elided_bytes + (errors.elided_bytes if errors is not None else 0),
        )

    async def close(self) -> None:
        """Closes every shell; running commands raise `ContainerDiedError`. Idempotent. Does not kill commands."""
        await self._shells.close()

    async def _run(
        self, script: Script, user: User | None, output: BoundedOutput, timeout_sec: float | None, exec_id: str
    ) -> tuple[ScriptRun, bool]:
        """Runs a command to its exit code or time limit; returns it and whether it timed out."""
        deadline = None if timeout_sec is None else time.monotonic() + timeout_sec
        for _ in range(MAX_IDLE + 2):
            channel = await self._shells.take(user)
            run = channel.start(output)
            self._shells.keep_spare(user)
            try:
                await channel.play(run, script, _until(deadline, at_most=_START_SEC))
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
                channel.raise_if_lost()  # not run again: it may have been run
            if run.pid or timed_out:
                return run, timed_out
        raise ContainerDiedError("The container no longer answers: its shells end before they run a command.")

    async def _open_sink(self, user: User | None, errors: BoundedOutput) -> tuple[Channel, ScriptRun]:
        """Opens a channel whose output is the stderr of a command in another one."""
        for take in (self._shells.take, self._shells.open):  # the first may have died or been stopped while idle
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
        raise ContainerDiedError("The container no longer answers: no stream for stderr could be opened.")

    async def _close_sink(self, channel: Channel, run: ScriptRun) -> None:
        """Collects the stderr of the ended command."""
        await channel.send(lambda key, _: f"end\n{key}\n")  # the second line is for the server, after the sink
        if not await happened(run.answered, _COLLECT_SEC):
            channel.close()


def _until(deadline: float | None, *, at_most: float | None = None) -> float | None:
    """Returns the seconds until the deadline, at least 0; `None` for no bound."""
    bounds = [] if at_most is None else [at_most]
    bounds += [] if deadline is None else [max(0.0, deadline - time.monotonic())]
    return min(bounds, default=None)
