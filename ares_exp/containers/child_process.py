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
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ares_exp.cancellation import finish, result_of

MAX_OUTPUT_BYTES = 256 * 2**20
_MAX_ERROR_BYTES = 128 * 1024
_MAX_LINE_CHARS = 1000
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
    """A program failed. The message lacks a subject (such as "was stopped"), which callers put in front of it."""


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

        The program has only the environment variables in `env`. After `timeout_sec`, its process group is killed.

        Raises:
            ChildFailedError: The program was stopped, took too long, or printed too much.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
            given.write(stdin)
            given.seek(0)
            with self._lock:
                self.pause(0)
                process = self._running = subprocess.Popen(
                    while_we_live(command, stdin=f"/dev/fd/{given.fileno()}"),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=env,
                    cwd=cwd,
                    pass_fds=(given.fileno(),),
                    start_new_session=True,  # without a terminal, the program cannot prompt the user
                )
            late = threading.Event()
            timer = threading.Timer(timeout_sec, self._kill, [process, late])
            timer.start()
            assert process.stdout is not None
            try:
                output: bytes = process.stdout.read(MAX_OUTPUT_BYTES + 1)
                if len(output) > MAX_OUTPUT_BYTES:
                    self._kill(process)
                exit_code = process.wait()
            finally:
                timer.cancel()
                self._kill(process)
                process.wait()
                process.stdout.close()
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES))
            lines = errors.read().decode("utf-8", "replace").splitlines()
        self.pause(0)
        if late.is_set():
            raise ChildFailedError(f"was killed after {timeout_sec:g} seconds")
        if len(output) > MAX_OUTPUT_BYTES:
            raise ChildFailedError(f"printed more than {MAX_OUTPUT_BYTES:,} bytes")
        return Ended(exit_code, output, [line.strip()[:_MAX_LINE_CHARS] for line in lines if line.strip()])

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
            await finish(asyncio.to_thread(self.stop))
            await finish(asyncio.wait_for(future, None))
            raise

    def _kill(self, process: subprocess.Popen[bytes], why: threading.Event | None = None) -> None:
        """Kills the program's process group and sets the event `why`. Does nothing if the group was killed before.

        A second kill could hit another process group with the same id. A closed `process.stdin` shows a kill.
        """
        assert process.stdin is not None
        with self._lock:
            if not process.stdin.closed:
                if why is not None:
                    why.set()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.stdin.close()
