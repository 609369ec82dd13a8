"""Child processes with limits on their time and output. They are killed if this process dies, even by `kill -9`.

A shell runs the program. It reads from a pipe that this process holds open. When this process ends, the kernel closes
the pipe.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ares_exp.cancellation import finish, in_daemon_thread, result_of

MAX_OUTPUT_BYTES = 256 * 2**20
_MAX_ERROR_BYTES = 128 * 1024
_MAX_LINE_CHARS = 1000
_LOOK_SEC = 0.2
_T = TypeVar("_T")

# 3 is the program's stdin, 4 the pipe.
_SHELL = """
exec 3<"$1" 4<&0 </dev/null
shift
"$@" <&3 3<&- 4<&- &
program=$!
{ read -r _; kill -9 0; } <&4 >/dev/null 2>&1 3<&- 4<&- &
exec 3<&- 4<&-
wait $program
"""


def while_we_live(command: Sequence[str], *, stdin: str = "/dev/null") -> list[str]:
    """Returns a command line that runs `command`, and kills the program's process group when its own stdin is closed.

    The program's stdin is the file `stdin`. The command line exits with the program's exit code. Start it with
    `start_new_session=True`, so that it leads a process group. Also close the pipe when the program has ended: a helper
    process of the command line waits until then.
    """
    return ["/bin/sh", "-c", _SHELL, "sh", stdin, *command]


class ChildFailedError(Exception):
    """A program failed. The message lacks a subject (such as "was stopped"), which callers put in front of it.

    `errors` contains the last lines that the program wrote to stderr.
    """

    errors: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The result of a program: its exit code, its complete stdout, and the last lines of its stderr (long ones cut)."""

    exit_code: int
    output: bytes
    errors: list[str]


class ChildProcess:
    """Runs programs one after the other, until another thread calls `stop`, which sets the event `stopped`."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._running: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout_sec: float = threading.TIMEOUT_MAX,
        cwd: Path | None = None,
        stdin: bytes = b"",
    ) -> Ended:
        """Runs a program to its end. Blocking.

        The program has only the environment variables in `env`. After `timeout_sec`, its process group is killed. When
        the program ends, does not wait for its child processes, even if they keep its stdout open.

        Raises:
            ChildFailedError: The program was stopped, took too long, or printed too much.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
            given.write(stdin)
            given.seek(0)
            with self._lock:
                self.pause(0)
                process = self._running = subprocess.Popen(
                    while_we_live(command, stdin=f"/dev/fd/{given.fileno()}"),
                    stdin=subprocess.PIPE,
                    stdout=printed,
                    stderr=errors,
                    env=env,
                    cwd=cwd,
                    pass_fds=(given.fileno(),),
                    start_new_session=True,  # without a terminal, the program cannot prompt the user
                )

            def prints_too_much() -> bool:
                return any(os.fstat(file.fileno()).st_size > MAX_OUTPUT_BYTES for file in (printed, errors))

            ends_at, is_late = time.monotonic() + timeout_sec, False
            try:
                while process.poll() is None and not (is_late or prints_too_much()):
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_LOOK_SEC)
                    is_late = time.monotonic() > ends_at
            finally:
                self._kill(process)
                exit_code = process.wait()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
            lines = errors.read().decode("utf-8", "replace").splitlines()
            last = [line.strip()[:_MAX_LINE_CHARS] for line in lines if line.strip()]
            failure = None
            if self.stopped.is_set():
                failure = ChildFailedError("was stopped")
            elif is_late and exit_code == -signal.SIGKILL:
                failure = ChildFailedError(f"was killed after {timeout_sec:g} seconds")
            elif prints_too_much():
                failure = ChildFailedError(f"printed more than {MAX_OUTPUT_BYTES:,} bytes")
            if failure is not None:
                failure.errors = last
                raise failure
            printed.seek(0)
            return Ended(exit_code, printed.read(), last)

    def run_python(
        self, program: Path, arguments: Sequence[str], *, env: Mapping[str, str], timeout_sec: float
    ) -> None:
        """Runs a Python file, which must not import ares_exp; see `run`. A nonzero exit code also raises an error."""
        ended = self.run([sys.executable, "-P", str(program), *arguments], env=env, timeout_sec=timeout_sec)
        if ended.exit_code != 0:
            raise ChildFailedError(f"failed: {ended.errors[-1] if ended.errors else f'exit code {ended.exit_code}'}")

    def pause(self, seconds: float) -> None:
        """Sleeps for `seconds`. Raises `ChildFailedError` as soon as `stop` is called. Blocking."""
        if self.stopped.wait(seconds):
            raise ChildFailedError("was stopped")

    def stop(self) -> None:
        """Kills the running program, and prevents the start of other programs. To be called from another thread."""
        with self._lock:
            self.stopped.set()
            running = self._running
        if running is not None:
            self._kill(running)

    async def stop_if_cancelled(self, work: Awaitable[_T]) -> _T:
        """Awaits `work`, which calls `run` in a thread. If the caller is cancelled, stops the work and waits for it."""
        future = asyncio.ensure_future(work)
        try:
            return await result_of(future)
        except asyncio.CancelledError:
            await finish(self._end(future))
            raise

    async def _end(self, work: asyncio.Future[Any]) -> None:
        """Stops the program, and waits until `work` has ended. Ignores its result."""
        await in_daemon_thread(self.stop)
        await asyncio.wait({work})
        work.cancelled() or work.exception()  # retrieves the exception

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kills the program's process group. Does nothing if the group was killed before.

        A second kill could hit another process group with the same id. A closed `process.stdin` shows a kill.
        """
        assert process.stdin is not None
        with self._lock:
            if not process.stdin.closed:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.stdin.close()
