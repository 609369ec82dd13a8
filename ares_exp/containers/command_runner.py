"""Commands of one container on persistent shells, so that a command costs no engine call.

A command borrows a free channel, or opens one. The channel is free again when no process in the container holds the
command's output: a background process that a command leaves behind neither blocks it nor writes into the output of the
next one. Time limits and cancellation kill the command's processes through another channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import posixpath
import secrets
import time
from collections.abc import Callable, Mapping

from ares_exp.cancellation import finish
from ares_exp.containers.command_killer import CommandKiller
from ares_exp.containers.container import MAX_OUTPUT_BYTES, ExecResult, Shell, User
from ares_exp.containers.shell_channel import BoundedOutput, Channel, Script, ScriptRun
from ares_exp.containers.shell_pool import MAX_IDLE, OpenStream, ShellPool
from ares_exp.containers.shell_script import check_arguments, command_script, end_of_sink, sink_script
from ares_exp.errors import ContainerDiedError

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
                    await _answered(run, _until(deadline))
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
        """Opens a channel whose output is the stderr of a command in another one.

        Raises:
            ContainerDiedError: The container is gone.
        """
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
        await channel.send(lambda key, _: end_of_sink(key=key))
        if not await _answered(run, _COLLECT_SEC):
            channel.close()


async def _answered(run: ScriptRun, seconds: float | None) -> bool:
    """Waits up to `seconds` for the exit code; returns whether it is known, or known never to come."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await run.answered.wait()
    return run.answered.is_set()


def _until(deadline: float | None, *, at_most: float | None = None) -> float | None:
    """Returns the seconds until the deadline, at least 0; `None` for no bound."""
    bounds = [] if at_most is None else [at_most]
    bounds += [] if deadline is None else [max(0.0, deadline - time.monotonic())]
    return min(bounds, default=None)
